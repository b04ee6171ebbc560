"""`--engine auto`: chooses the engine by the layout, the model's size, the devices' memory and the installed packages.

torch is imported only to look at a device.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from megaswift import log
from megaswift.bridge.adapters.options.checks import SHARDED, base_quantization_bits, non_lora_peft_method_of
from megaswift.config import SwiftConfig
from megaswift.engine.options import fsdp_file
from megaswift.engine.options.engine_checks import (
    AUTO,
    NATIVE,
    first_given_torch_only_option,
    is_engine_open,
    requested_engine,
    uses_model_parallelism,
)
from megaswift.engine.options.optimizer import ELEMENTWISE, EVERYWHERE, is_elementwise_plugin
from megaswift.errors import UserError
from megaswift.families import FAMILIES
from megaswift.folders.source import locate_model
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.models.family import read_config_json
from megaswift.models.quantized_training import KERNELS, quant_method
from megaswift.models.spec import LINEAR, ModelSpec
from megaswift.run.checks.encoders import with_encoder_defaults

SMALL = 1e9
"""Parameters up to which a model is replicated."""
MIDDLE = 7e9
"""Parameters up to which only gradients and optimizer states are worth sharding."""
KINDS = ("ddp", "zero2", "fsdp2")
"""From what holds most on a rank to what holds least."""
REASONS = {
    "ddp": ", whole on each device",
    "zero2": ": gradients and optimizer states sharded",
    "fsdp2": ": weights sharded, too",
}
SHARE = 0.8
"""The share of a process's memory that weights, gradients and optimizer may take: the rest is for activations."""


@dataclass(frozen=True)
class MachineFacts:
    """What a run has."""

    processes: int
    memory: float
    """Bytes for one process."""
    trains_all: bool = True
    """False: adapters only, so that weights are nearly all there is."""

    def need(self, kind: str, size: int) -> float:
        """Return the bytes on a rank: 4 a parameter for weights, 12 for its gradient and Adam's two moments, whole or
        in parts."""
        weights = 4.0 * size
        rest = 12.0 * size * self.trains_all
        whole = {"ddp": (1, 1), "zero2": (1, self.processes), "fsdp2": (self.processes, self.processes)}[kind]
        return weights / whole[0] + rest / whole[1]

    def holds(self, kind: str, size: int) -> bool:
        """Return whether the bytes of `need` fit."""
        return self.need(kind, size) <= SHARE * self.memory


def available_memory_bytes_per_process(processes: int) -> float:
    """Return a GPU's memory in bytes, or a process's share of this machine's memory."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_processes


def resolve_engine(cfg: SwiftConfig, world_size: int, tell: bool = True) -> SwiftConfig:
    """Choose the engine where the options leave it open, and return the configuration with its name. `tell`: print
    which engine, and why. An encoder brings defaults of its own."""
    cfg = with_encoder_defaults(cfg)
    requested = requested_engine(cfg)
    if tell and (cfg.engine.fsdp or cfg.engine.fsdp_config):
        log.info("engine fsdp2: the FSDP options select torch's fully_shard (FSDP2); FSDP1 is not used")
    if cfg.engine.fsdp_config:
        settings = fsdp_file.fsdp_file_options(cfg)
        for notice in settings.notices if tell else ():
            log.info(notice)
        cfg = cfg.replace(**settings.options)
    needs_torch = reason_for_torch_engine(cfg)
    if requested != AUTO and not needs_torch:
        return cfg if cfg.engine.engine == requested else cfg.replace(engine=requested)
    machine = MachineFacts(world_size, available_memory_bytes_per_process(world_size), cfg.model.train_type == "full")
    try:
        spec = spec_from_family_or_size_fields(locate_model(cfg.model, weights=False))
    except UserError:  # preflight reports it with all other problems
        return cfg.replace(engine="ddp")
    kind, why = choose_engine(spec, uses_model_parallelism(cfg), machine, bool(needs_torch))
    optimizer = cfg.optim.optimizer
    if kind != "ddp" and optimizer in ELEMENTWISE:
        kind = "fsdp2"
        why = f"only fsdp2 and ddp support the optimizer {optimizer}"
    elif kind != "ddp" and optimizer not in EVERYWHERE and not is_elementwise_plugin(optimizer):
        kind = "ddp"
        why = f"the optimizer {optimizer} needs whole matrices"
    elif kind == "zero2" and optimizer == "sgd":
        kind = "fsdp2"
        why = "ZeRO does not support the optimizer sgd"
    if non_lora_peft_method_of(cfg) is not None or base_quantization_bits(cfg) is not None:
        kind, why = restrict_engine_for_adapters(cfg, kind, why)
    if tell:
        log.info(f"engine {kind}: {needs_torch}{why}")
    return cfg.replace(engine=kind)


def reason_for_torch_engine(cfg: SwiftConfig) -> str:
    """Return why a torch engine replaces the default engine; empty where none does, or where the user named an
    engine."""
    if not is_engine_open(cfg):
        return ""
    if name := first_given_torch_only_option(cfg):
        given = cfg.typed[name].label if name in cfg.typed else f"--{name}"
        return f"{given} needs a torch engine; "
    try:
        config = read_config_json(locate_model(cfg.model, weights=False))
    except UserError:  # preflight reports it with all other problems
        return ""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        return f"the native engine does not support model_type {family}; "
    method = quant_method(config)
    return f"the native engine does not read {method} weights; " if method in KERNELS else ""


def restrict_engine_for_adapters(cfg: SwiftConfig, kind: str, why: str) -> tuple[str, str]:
    """Choose again where the adapters, or the weights under them, allow fewer engines."""
    name = f"train_type {cfg.model.train_type}"
    method = non_lora_peft_method_of(cfg)
    if kind == NATIVE and cfg.model.train_type != "qlora" and not uses_model_parallelism(cfg):
        return "ddp", f"the native engine does not support {name}"
    if method is not None and method.engines and kind not in (NATIVE, *method.engines):
        return method.engines[0], f"{name} requires it"
    if kind in SHARDED and base_quantization_bits(cfg) is not None:
        return "ddp", "quantized weights cannot be sharded"
    return (
        ("zero2", f"{name} cannot be sharded")
        if kind in SHARDED and method is not None and method.whole
        else (kind, why)
    )


def choose_engine(spec: ModelSpec, axes: bool, machine: MachineFacts, torch_only: bool = False) -> tuple[str, str]:
    """Return the engine and the reason. `torch_only`: the native engine does not serve this run."""
    size = approximate_parameter_count(spec)
    text = f"{size / 1e9:.3g} B parameters" if size >= 1e8 else f"{size / 1e6:.2f} M parameters"
    if axes:
        return NATIVE, "a model-parallel axis is set"
    if spec.family in FAMILIES and spec.experts and size > MIDDLE and not torch_only:
        return NATIVE, f"{text} in {spec.experts} experts per layer"
    if machine.processes == 1:
        return (
            "ddp",
            f"{text}, whole on each device" if size < SMALL else f"{text} on a single process",
        )
    by_size = "zero2" if size <= MIDDLE else "fsdp2"
    if size < SMALL:
        by_size = "ddp"
    known = [k for k in KINDS if k != "zero2" or importlib.util.find_spec("deepspeed") is not None]
    later = known[next(i for i, k in enumerate(known) if KINDS.index(k) >= KINDS.index(by_size)) :]
    kind = next((k for k in later if machine.holds(k, size)), later[-1])
    if kind == later[0]:
        return kind, f"{text}, and deepspeed is not installed" if kind != by_size else f"{text}{REASONS[kind]}"
    room = f"{machine.memory / 2**30:.0f} GiB per process"
    return kind, f"{text}: {later[0]} would need about {machine.need(later[0], size) / 2**30:.0f} GiB of {room}"


def approximate_parameter_count(spec: ModelSpec) -> int:
    """Counts the matrices of a transformer of these sizes: near enough to choose by."""
    gates = spec.attention_width if spec.transformer.get("attention_output_gate") else 0
    attention = 2 * (spec.attention_width + spec.kv_width) + gates
    linear = 2 * spec.linear_groups * spec.linear_key_width + 3 * spec.linear_values if spec.linear_layer_count else 0
    mlp_matrices = 3 if spec.transformer.get("gated_linear_unit", True) else 2
    total = 0
    for kind in spec.layer_kinds:
        width = spec.experts * spec.expert_ffn + spec.shared_ffn if kind.moe else spec.ffn
        mixer = linear if kind.mixer == LINEAR else attention
        total += spec.hidden_size * (mixer + mlp_matrices * width)
    return total + spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
