"""Weight sync of LoRA runs: whether samplers get adapters alone or merged weights, and through which folder.

Alone, they are a folder of PEFT's that every sampler reads, and the model's own weights are never sent: samplers read
them from the model's folder. That takes adapters which every sampler adds to these weights as the trainer does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from megaswift.bridge.adapters.options.checks import base_quantization_bits
from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import capabilities_of
from megaswift.errors import Problem
from megaswift.families import family_of
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.models.family import read_config_json
from megaswift.models.quantization import FIELD
from megaswift.models.spec import ModelSpec
from megaswift.models.targets import select_projections
from megaswift.models.vision import has_vision_tower

EXPERTS = "experts have adapters, whose format differs between samplers"
OWN_RANKS = ("rank_pattern", "alpha_pattern")
"""Fields of adapter_config.json that servers do not read."""


def syncs_adapters_only(cfg: SwiftConfig, spec: ModelSpec, folder: Path) -> bool:
    """Return whether the samplers of a run get adapters alone."""
    chosen = cfg.rollout.rollout_lora
    return not merged_sync_reason(cfg, spec, folder) if chosen is None else chosen


def adapter_sync_problems(cfg: SwiftConfig, spec: ModelSpec, folder: Path) -> Iterator[Problem]:
    """Report adapters that should be synchronized without the base and cannot be."""
    if cfg.rollout.rollout_lora and (why := merged_sync_reason(cfg, spec, folder)):
        yield Problem("--rollout_lora true", why, "leave it out: megaswift then sends merged weights")


def merged_sync_reason(cfg: SwiftConfig, spec: ModelSpec, folder: Path) -> str:
    """Return why samplers cannot have adapters alone, with the model in `folder`; empty where they can."""
    stored = _stored(cfg.lora.adapters)
    reasons: tuple[tuple[Any, str], ...] = (
        (cfg.model.train_type == "full", "there are no adapters"),
        (
            cfg.model.train_type not in ("lora", "qlora"),
            f"not every sampler supports {cfg.model.train_type}",
        ),
        (
            base_quantization_bits(cfg) or cfg.model.train_type == "qlora",
            "the trained model's weights are quantized, but the sampler's would not be",
        ),
        (
            read_config_json(folder).get(FIELD),
            "the model's weights are stored quantized, and samplers handle these differently",
        ),
        (stored.get("use_dora", cfg.lora.use_dora), "DoRA rescales the weights"),
        (stored.get("modules_to_save", cfg.lora.modules_to_save), "modules_to_save are not adapters"),
        (any(stored.get(name) for name in OWN_RANKS), "the adapters' ranks or scales differ from module to module"),
        (has_vision_tower(spec.hf_config), "the model has a vision encoder"),
        (
            find_checkpoint(folder) and cfg.rollout.rollout_backend != "transformers",
            "the model is a training checkpoint, which samplers cannot read",
        ),
        (stored.get("bias", "none") != "none", "biases are trained, too"),
        (cfg.rollout.rollout_backend == "transformers" and util.find_spec("peft") is None, "PEFT is not installed"),
        (stored.get("target_parameters", cfg.lora.target_parameters), EXPERTS),
    )
    return (
        next((why for holds, why in reasons if holds), "")
        or (EXPERTS if _experts(cfg, spec) else "")
        or _too_wide(cfg.rollout.rollout_backend, cfg.lora)
    )


def adapter_rank(lora: LoraConfig) -> int:
    """Return the adapters' rank."""
    return int(_stored(lora.adapters).get("r", lora.lora_rank))


def _stored(adapters: str | None) -> dict[str, Any]:
    """What the folder says that the run goes on from; others than us say what is wrong with it."""
    try:
        stored = json.loads((Path(str(adapters)) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _experts(cfg: SwiftConfig, spec: ModelSpec) -> bool:
    """Whether an expert carries an adapter. In transformers' models they are no modules, so none does unless a
    parameter is named."""
    if not spec.experts or not capabilities_of(cfg).expert_adapters:
        return False
    if cfg.lora.adapters is None:
        return any(
            ".experts." in p.megatron
            for p in select_projections(family_of(spec.hf_config), spec, cfg.lora.target_modules)
        )
    from megaswift.bridge.adapters.folder import TENSORS  # brings torch
    from megaswift.bridge.hf.header import read_safetensors_header

    return any(".experts." in name for name in read_safetensors_header(Path(cfg.lora.adapters) / TENSORS))


def _too_wide(backend: str, lora: LoraConfig) -> str:
    if not backend.startswith("vllm"):
        return ""
    from megaswift.rollout.vllm_package import RANKS

    return f"vLLM supports adapters up to rank {RANKS[-1]}" if adapter_rank(lora) > RANKS[-1] else ""
