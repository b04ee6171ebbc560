"""`--engine auto`: which engine serves a run, by its axes, the model's size and what is installed. No torch."""

from __future__ import annotations

import importlib.util

from megaswift import log
from megaswift.config import SwiftConfig, fsdp_json
from megaswift.config.adapter_rules import SHARDED, bits_of, method_of
from megaswift.config.engine_rules import AUTO, NATIVE, engine_of, splits_model
from megaswift.config.optim import EVERYWHERE, ON_PARTS
from megaswift.families import FAMILIES
from megaswift.families.model_source import locate
from megaswift.families.spec import ModelSpec
from megaswift.families.unlisted import any_spec

SMALL, MIDDLE = 1e9, 7e9
"""Parameters up to which a model is replicated, and up to which only gradients and optimizer states are worth sharding."""


def settle(cfg: SwiftConfig, world_size: int, tell: bool = True) -> SwiftConfig:
    """The configuration with its engine named; `auto` and the options that mean one are resolved. `tell`: which, and why."""
    asked = engine_of(cfg)
    if tell and (cfg.engine.fsdp or cfg.engine.fsdp_config):
        log.info("engine fsdp2: FSDP's options mean torch's fully_shard (FSDP2); FSDP1 is not used")
    if cfg.engine.fsdp_config:
        cfg = cfg.replace(**fsdp_json.of(cfg).options)
    if asked != AUTO:
        return cfg if cfg.engine.engine == asked else cfg.replace(engine=asked)
    kind, why = choose(any_spec(locate(cfg.model, weights=False)), splits_model(cfg), world_size)
    optimizer = cfg.optim.optimizer
    if kind != "ddp" and optimizer in ON_PARTS:
        kind, why = "fsdp2", f"it and ddp step the optimizer {optimizer}"
    elif kind != "ddp" and optimizer not in EVERYWHERE:
        kind, why = "ddp", f"the optimizer {optimizer} steps whole matrices"
    if method_of(cfg) is not None or bits_of(cfg) is not None:
        kind, why = for_adapters(cfg, kind, why)
    if tell:
        log.info(f"engine {kind}: {why}")
    return cfg.replace(engine=kind)


def for_adapters(cfg: SwiftConfig, kind: str, why: str) -> tuple[str, str]:
    """The same where the adapters, or the weights under them, leave the choice to fewer engines."""
    name, method = f"train_type {cfg.model.train_type}", method_of(cfg)
    if kind == NATIVE and cfg.model.train_type != "qlora" and not splits_model(cfg):
        return "ddp", f"{name} is not the native engine's"
    if method is not None and method.engines and kind not in (NATIVE, *method.engines):
        return method.engines[0], f"{name} needs it"
    if kind in SHARDED and bits_of(cfg) is not None:
        return "ddp", "weights in few bits are whole on every rank"
    return ("zero2", f"{name} cannot be split") if kind in SHARDED and method is not None and method.whole else (kind, why)


def choose(spec: ModelSpec, axes: bool, world_size: int) -> tuple[str, str]:
    """(engine, reason)."""
    size = parameters(spec)
    text = f"{size / 1e9:.3g} B parameters" if size >= 1e8 else f"{size / 1e6:.2f} M parameters"
    if axes:
        return NATIVE, "a model-parallel axis is set"
    if spec.family in FAMILIES and spec.experts and size > MIDDLE:
        return NATIVE, f"{text} in {spec.experts} experts a layer"
    if size < SMALL or world_size == 1:
        return "ddp", f"{text}, whole on each device" if size < SMALL else f"{text} on one process, nothing to share them with"
    if importlib.util.find_spec("deepspeed") is None:
        return "fsdp2", f"{text}, and deepspeed is not installed"
    return ("zero2", f"{text}: gradients and optimizer states in parts") if size <= MIDDLE else ("fsdp2", f"{text}: weights in parts too")


def parameters(spec: ModelSpec) -> int:
    """Of the matrices of a gated transformer of these sizes: near enough to choose by."""
    attention = 2 * spec.hidden_size * (spec.attention_width + spec.kv_width)
    total = 0
    for expert_layer in spec.moe_layers:
        width = spec.experts * spec.expert_ffn + spec.shared_ffn if expert_layer else spec.ffn
        total += attention + 3 * spec.hidden_size * width
    return total + spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
