"""Chooses the settings with which a run fits its device (`--fit true`).

Owns the order of the choice. Settings are tried from the cheapest to the dearest: recomputation (none, of the MLPs or
experts, full), then smaller micro-batches of the same global batch, then the distributed optimizer, then the
precision-aware optimizer (16 bytes a bfloat16 parameter in place of 18), then with bfloat16 main gradients (14), then
the optimizer in host memory. A later one is used only where no combination of the earlier ones fits, and options that
are not left open stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.memory.estimate import MemoryEstimate, RunParameters
from megaswift.memory.microbatch_setup import TRANSFORMER_ENGINE, ComputeKernels
from megaswift.memory.step_options import StepOptions
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.pipeline_split import divisors

Settings = dict[str, Any]
RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
ALL = (
    *RECOMPUTE,
    *BATCH,
    "distributed_optimizer",
    "precision_aware_optimizer",
    "main_grads_dtype",
    "optimizer_cpu_offload",
)
"""The options that a choice can set."""


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


def choose_settings_that_fit(
    parameters: RunParameters,
    usable: int,
    options_with: Callable[[Settings], StepOptions],
    left_open: Collection[str],
) -> FitChoice | NoFit:
    """The first settings whose estimate is at most `usable` bytes.

    Args:
        options_with: The run's options with these settings; `{}`: as they are.
        left_open: Those of `ALL` that may change.
    """
    now = options_with({})
    before = parameters.estimate(now)
    tried = [
        (settings, parameters.estimate(options_with(settings)))
        for settings in _in_order(now, parameters, frozenset(left_open))
    ]
    for settings, estimate in tried:
        if estimate.total <= usable:
            return FitChoice(settings, before, estimate)
    nearest, least = min(tried, key=lambda t: t[1].total)
    for settings in _in_order(now, parameters, frozenset(ALL)):
        estimate = parameters.estimate(options_with(settings))
        if estimate.total <= usable:
            return NoFit(before, nearest, least, settings, estimate)
    return NoFit(before, nearest, least, {}, None)


def _in_order(now: StepOptions, parameters: RunParameters, left_open: frozenset[str]) -> Iterator[Settings]:
    """All combinations of settings that may change, the dearest changing last."""
    kernels = parameters.kernels
    levers = [
        _offload(now.optim, kernels, left_open),
        _precision_aware(now.optim, kernels, left_open),
        _distributed(now, left_open),
        _micro_batches(now, left_open),
        _recomputation(now.model, parameters.spec, left_open),
    ]
    for combination in product(*levers):
        settings = {name: value for part in combination for name, value in part.items()}
        if settings.get("optimizer_cpu_offload") and {"precision_aware_optimizer", "main_grads_dtype"} & {*settings}:
            continue  # main weights then stay in float32
        if settings.get("precision_aware_optimizer") and not settings.get(
            "distributed_optimizer", now.distributed_optimizer
        ):
            continue
        yield settings


def _recomputation(model: ModelConfig, spec: ModelSpec, left_open: frozenset[str]) -> list[Settings]:
    as_it_is: list[Settings] = [{}]
    if not left_open.issuperset(RECOMPUTE) or model.recompute_granularity == "full":
        return as_it_is
    modules = tuple(name for name, kind in (("mlp", False), ("moe", True)) if kind in spec.moe_layers)
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    return [*as_it_is, selective, {"recompute_granularity": "full", "recompute_modules": ()}]


def _micro_batches(now: StepOptions, left_open: frozenset[str]) -> list[Settings]:
    """Smaller ones in more passes: the global batch is the same."""
    if not left_open.issuperset(BATCH):
        return [{}]
    smaller = [n for n in reversed(divisors(now.rows)) if n < now.rows]
    return [
        {},
        *(
            {"per_device_train_batch_size": n, "gradient_accumulation_steps": now.passes * now.rows // n}
            for n in smaller
        ),
    ]


def _distributed(now: StepOptions, left_open: frozenset[str]) -> list[Settings]:
    chosen = now.distributed_optimizer or now.optim.optimizer != "adam"
    if chosen or "distributed_optimizer" not in left_open:
        return [{}]
    return [{}, {"distributed_optimizer": True}]


def _precision_aware(o: OptimConfig, kernels: ComputeKernels, left_open: frozenset[str]) -> list[Settings]:
    """Transformer Engine's Adam, which stores of bfloat16 weights what they lack; then with bfloat16 gradients."""
    able = kernels.linear == TRANSFORMER_ENGINE and kernels.dtype == "bfloat16" and o.optimizer == "adam"
    if not able or o.optimizer_cpu_offload:
        return [{}]
    aware: Settings = {} if o.precision_aware_optimizer else {"precision_aware_optimizer": True}
    if aware and "precision_aware_optimizer" not in left_open:
        return [{}]
    levels = [{}, aware] if aware else [{}]
    if o.main_grads_dtype == "fp32" and "main_grads_dtype" in left_open:
        levels.append({**aware, "main_grads_dtype": "bf16"})
    return levels


def _offload(o: OptimConfig, kernels: ComputeKernels, left_open: frozenset[str]) -> list[Settings]:
    """To the host, from a GPU."""
    able = kernels.cuda and o.optimizer == "adam" and not o.optimizer_cpu_offload and not o.precision_aware_optimizer
    if not able or "optimizer_cpu_offload" not in left_open:
        return [{}]
    return [{}, {"optimizer_cpu_offload": True}]
