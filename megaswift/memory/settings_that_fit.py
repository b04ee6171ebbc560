"""Chooses the settings with which a run fits its device (`--fit true`).

Owns the order of the choice. Settings are tried from the cheapest to the dearest: recomputation (none, of the MLPs or
experts, full), then smaller micro-batches of the same global batch, then the distributed optimizer, then the
precision-aware optimizer (16 bytes a bfloat16 parameter in place of 18), then with bfloat16 main gradients (14), then
the optimizer in host memory. A later one is used only where no combination of the earlier ones fits, and what the user
has set stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.config.batch_arithmetic import batch_plan
from megaswift.memory.memory_estimate import MemoryEstimate, RunParameters
from megaswift.memory.microbatch_setup import TRANSFORMER_ENGINE
from megaswift.models.spec import ModelSpec
from megaswift.parallel.pipeline_split import divisors

Settings = dict[str, Any]
RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True)
class FitChoice:
    """What was chosen."""

    settings: Settings
    """Options that differ from the configuration's; empty: it fits as it is."""
    before: MemoryEstimate
    """With the configuration as it is."""
    after: MemoryEstimate


@dataclass(frozen=True)
class NoFit:
    """Nothing fits."""

    before: MemoryEstimate
    nearest: Settings
    """With which the least is needed."""
    least: MemoryEstimate
    given_up: Settings
    """With which it would fit, had the user not set some of these options; empty: it would not."""
    then: MemoryEstimate | None


def choose_settings_that_fit(cfg: SwiftConfig, parameters: RunParameters, usable: int) -> FitChoice | NoFit:
    """The first settings whose estimate is at most `usable` bytes."""
    before = parameters.estimate(cfg)
    tried = [(settings, parameters.estimate(cfg.replace(**settings))) for settings in _in_order(cfg, parameters, True)]
    for settings, estimate in tried:
        if estimate.total <= usable:
            return FitChoice(settings, before, estimate)
    nearest, least = min(tried, key=lambda t: t[1].total)
    for settings in _in_order(cfg, parameters, False):
        estimate = parameters.estimate(cfg.replace(**settings))
        if estimate.total <= usable:
            return NoFit(before, nearest, least, settings, estimate)
    return NoFit(before, nearest, least, {}, None)


def _in_order(cfg: SwiftConfig, parameters: RunParameters, keep: bool) -> Iterator[Settings]:
    """All combinations, the dearest setting changing last; `keep`: those that leave alone what the user has set."""
    levers = [
        _offload(cfg, parameters, keep),
        _precision_aware(cfg, parameters, keep),
        _distributed(cfg, keep),
        _micro_batches(cfg, parameters, keep),
        _recomputation(cfg, parameters.spec, keep),
    ]
    for combination in product(*levers):
        settings = {name: value for part in combination for name, value in part.items()}
        if settings.get("optimizer_cpu_offload") and {"precision_aware_optimizer", "main_grads_dtype"} & {*settings}:
            continue  # main weights then stay in float32
        if settings.get("precision_aware_optimizer") and not settings.get(
            "distributed_optimizer", cfg.parallel.distributed_optimizer
        ):
            continue
        yield settings


def _free(cfg: SwiftConfig, keep: bool, *names: str) -> bool:
    """Whether the options may be chosen; also `none`, in words, is the user's choice."""
    return not keep or not any(n in cfg.given or (n in cfg.typed and cfg.value(n) is None) for n in names)


def _recomputation(cfg: SwiftConfig, spec: ModelSpec, keep: bool) -> list[Settings]:
    as_it_is: list[Settings] = [{}]
    if not _free(cfg, keep, *RECOMPUTE) or cfg.model.recompute_granularity == "full":
        return as_it_is
    modules = tuple(name for name, kind in (("mlp", False), ("moe", True)) if kind in spec.moe_layers)
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    return [*as_it_is, selective, {"recompute_granularity": "full", "recompute_modules": ()}]


def _micro_batches(cfg: SwiftConfig, parameters: RunParameters, keep: bool) -> list[Settings]:
    """Smaller ones in more passes: the global batch is the same."""
    plan = batch_plan(cfg.train, parameters.layout.dp)
    fixed = ["per_device_train_batch_size"] + (
        ["gradient_accumulation_steps"] if cfg.train.global_batch_size is None else []
    )
    if not _free(cfg, keep, *fixed):
        return [{}]
    smaller = [n for n in reversed(divisors(plan.per_device)) if n < plan.per_device]
    return [
        {},
        *(
            {
                "per_device_train_batch_size": n,
                "gradient_accumulation_steps": plan.accumulation * plan.per_device // n,
            }
            for n in smaller
        ),
    ]


def _distributed(cfg: SwiftConfig, keep: bool) -> list[Settings]:
    chosen = cfg.parallel.distributed_optimizer or cfg.optim.optimizer != "adam"
    return [{}] if chosen or not _free(cfg, keep, "distributed_optimizer") else [{}, {"distributed_optimizer": True}]


def _precision_aware(cfg: SwiftConfig, parameters: RunParameters, keep: bool) -> list[Settings]:
    """Transformer Engine's Adam, which stores of bfloat16 weights what they lack; then with bfloat16 gradients."""
    kernels, o = parameters.kernels, cfg.optim
    able = kernels.linear == TRANSFORMER_ENGINE and kernels.dtype == "bfloat16" and o.optimizer == "adam"
    if not able or o.optimizer_cpu_offload:
        return [{}]
    aware: Settings = {} if o.precision_aware_optimizer else {"precision_aware_optimizer": True}
    if aware and not _free(cfg, keep, "precision_aware_optimizer"):
        return [{}]
    levels = [{}, aware] if aware else [{}]
    if o.main_grads_dtype == "fp32" and _free(cfg, keep, "main_grads_dtype"):
        levels.append({**aware, "main_grads_dtype": "bf16"})
    return levels


def _offload(cfg: SwiftConfig, parameters: RunParameters, keep: bool) -> list[Settings]:
    """To the host, from a GPU."""
    o = cfg.optim
    able = (
        parameters.kernels.cuda
        and o.optimizer == "adam"
        and not o.optimizer_cpu_offload
        and not o.precision_aware_optimizer
    )
    return [{}, {"optimizer_cpu_offload": True}] if able and _free(cfg, keep, "optimizer_cpu_offload") else [{}]
