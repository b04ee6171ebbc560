"""Settings of a run that lower its memory, and the choice among them (`--fit true`, `megaswift plan`).

Owns which settings exist and the order of the choice: by the milliseconds that they add to a step, and where they add
none by how much they change: the distributed optimizer, the precision-aware optimizer (16 bytes a bfloat16 parameter in
place of 18), with a bfloat16 first moment (14), with bfloat16 main gradients (12). Recomputation, smaller micro-batches
of the same global batch and the optimizer in host memory cost time. Options that are not left open stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.memory.estimate import MemoryEstimate, RunParameters
from megaswift.memory.microbatch_setup import TRANSFORMER_ENGINE, ComputeKernels
from megaswift.memory.step_options import StepOptions
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.pipeline_split import divisors
from megaswift.planner.step_time import TimeModel

Settings = dict[str, Any]
RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
ALL = (
    *RECOMPUTE,
    *BATCH,
    "distributed_optimizer",
    "precision_aware_optimizer",
    "exp_avg_dtype",
    "main_grads_dtype",
    "optimizer_cpu_offload",
)
"""The options that a choice can set."""
SMALLER = ("exp_avg_dtype", "main_grads_dtype")
"""Options that store less in bfloat16, in the order in which they are taken."""
STATES = ("distributed_optimizer", "precision_aware_optimizer", *SMALLER)
"""Options that make states smaller and cost no time."""
MODEL_FIELDS = frozenset(f.name for f in fields(ModelConfig))
OPTIM_FIELDS = frozenset(f.name for f in fields(OptimConfig))


@dataclass(frozen=True)
class FitChoice:
    """The chosen settings."""

    settings: Settings
    """Options that differ from the configuration's; empty: it fits as it is."""
    before: MemoryEstimate
    """With the configuration as it is."""
    after: MemoryEstimate
    seconds_before: float
    seconds: float
    """Of a step, by the time model."""


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
    parameters: RunParameters, usable: int, now: StepOptions, left_open: Collection[str], time: TimeModel
) -> FitChoice | NoFit:
    """Returns the settings that add least to a step and whose estimate is at most `usable` bytes; none where the run
    fits as it is.

    Args:
        now: The run's options as they are.
        left_open: Those of `ALL` that may change.
    """
    before = parameters.estimate(now)
    seconds = time.on(parameters).step(now).total
    if before.total <= usable:
        return FitChoice({}, before, before, seconds, seconds)
    if (found := _cheapest(parameters, usable, now, left_open, time)) is not None:
        settings, estimate, after = found
        return FitChoice(settings, before, estimate, seconds, after)
    every = combinations(now, parameters.kernels, parameters.spec, left_open)
    estimates = [(settings, parameters.estimate(with_settings(now, settings))) for settings in every]
    nearest, least = min(estimates, key=lambda tried: tried[1].total)
    free = _cheapest(parameters, usable, now, ALL, time)
    return NoFit(before, nearest, least, {} if free is None else free[0], None if free is None else free[1])


def _cheapest(
    parameters: RunParameters, usable: int, now: StepOptions, left_open: Collection[str], time: TimeModel
) -> tuple[Settings, MemoryEstimate, float] | None:
    """Settings that fit, with their estimate and seconds of a step."""
    every = combinations(now, parameters.kernels, parameters.spec, left_open)
    tried = [(settings, with_settings(now, settings)) for settings in every]
    of_run = time.on(parameters)
    seconds = [of_run.step(options).total for _, options in tried]
    for i in cheapest_first(tried, seconds):
        settings, options = tried[i]
        estimate = parameters.estimate(options)
        if estimate.total <= usable:
            return settings, estimate, seconds[i]
    return None


def cheapest_first(tried: Sequence[tuple[Settings, StepOptions]], seconds: Sequence[float]) -> list[int]:
    """Returns the places of settings in the order of what they add to a step. Smaller states add nothing: they save
    time too, but that is no reason to take them."""
    cost: dict[tuple[object, ...], float] = {}
    work = []
    for (settings, options), total in zip(tried, seconds, strict=True):
        own = (options.rows, *((name, value) for name, value in settings.items() if name not in STATES))
        cost.setdefault(own, total)  # the first has the states as they are
        work.append(own)
    return sorted(range(len(tried)), key=lambda i: (cost[work[i]], i))


def with_settings(options: StepOptions, settings: Settings) -> StepOptions:
    """Returns the options with these settings."""
    model = {n: v for n, v in settings.items() if n in MODEL_FIELDS}
    optim = {n: v for n, v in settings.items() if n in OPTIM_FIELDS}
    return replace(
        options,
        model=replace(options.model, **model) if model else options.model,
        optim=replace(options.optim, **optim) if optim else options.optim,
        distributed_optimizer=settings.get("distributed_optimizer", options.distributed_optimizer),
        rows=settings.get("per_device_train_batch_size", options.rows),
        passes=settings.get("gradient_accumulation_steps", options.passes),
    )


def combinations(
    now: StepOptions, kernels: ComputeKernels, spec: ModelSpec, left_open: Collection[str]
) -> Iterator[Settings]:
    """Yields all combinations of settings that may change, none of them first."""
    levers = [
        _offload(now.optim, kernels, left_open),
        _micro_batches(now, left_open),
        _recomputation(now.model, spec, left_open),
        _precision_aware(now, kernels, left_open),
        _distributed(now, left_open),
    ]
    for combination in product(*levers):
        settings = {name: value for part in combination for name, value in part.items()}
        if settings.get("optimizer_cpu_offload") and {"precision_aware_optimizer", *SMALLER} & {*settings}:
            continue  # main weights then stay in float32
        if settings.get("precision_aware_optimizer") and not settings.get(
            "distributed_optimizer", now.distributed_optimizer
        ):
            continue
        yield settings


def _recomputation(model: ModelConfig, spec: ModelSpec, left_open: Collection[str]) -> list[Settings]:
    as_it_is: list[Settings] = [{}]
    fixed = model.recompute_granularity == "full" or model.uses_cuda_graphs
    if fixed or not {*RECOMPUTE} <= {*left_open}:
        return as_it_is
    modules = tuple(name for name, kind in (("mlp", False), ("moe", True)) if kind in spec.moe_layers)
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    return [*as_it_is, selective, {"recompute_granularity": "full", "recompute_modules": ()}]


def _micro_batches(now: StepOptions, left_open: Collection[str]) -> list[Settings]:
    """Smaller ones in more passes: the global batch is the same."""
    if not {*BATCH} <= {*left_open}:
        return [{}]
    smaller = [n for n in reversed(divisors(now.rows)) if n < now.rows]
    return [
        {},
        *(
            {"per_device_train_batch_size": n, "gradient_accumulation_steps": now.passes * now.rows // n}
            for n in smaller
        ),
    ]


def _distributed(now: StepOptions, left_open: Collection[str]) -> list[Settings]:
    chosen = now.distributed_optimizer or now.optim.optimizer != "adam"
    if chosen or "distributed_optimizer" not in left_open:
        return [{}]
    return [{}, {"distributed_optimizer": True}]


def _precision_aware(now: StepOptions, kernels: ComputeKernels, left_open: Collection[str]) -> list[Settings]:
    """Transformer Engine's Adam, which stores of bfloat16 weights what they lack; then with a bfloat16 moment, and with
    bfloat16 gradients too. Weights in FP8 need main weights of their own."""
    o = now.optim
    able = kernels.linear == TRANSFORMER_ENGINE and kernels.dtype == "bfloat16" and o.optimizer == "adam"
    if not able or o.optimizer_cpu_offload or now.model.fp8_param_gather:
        return [{}]
    aware: Settings = {} if o.precision_aware_optimizer else {"precision_aware_optimizer": True}
    if aware and "precision_aware_optimizer" not in left_open:
        return [{}]
    levels = [{}, aware] if aware else [{}]
    for name in SMALLER:
        if getattr(o, name) == "fp32" and name in left_open:
            levels.append({**levels[-1], name: "bf16"})
    return levels


def _offload(o: OptimConfig, kernels: ComputeKernels, left_open: Collection[str]) -> list[Settings]:
    """To the host, from a GPU."""
    able = kernels.cuda and o.optimizer == "adam" and not o.optimizer_cpu_offload and not o.precision_aware_optimizer
    if not able or "optimizer_cpu_offload" not in left_open:
        return [{}]
    return [{}, {"optimizer_cpu_offload": True}]
