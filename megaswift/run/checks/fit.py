"""`--fit true`: the settings of a run that fit its devices, chosen before the engine is built.

Owns the device's memory and the texts; the choice itself is `planner/settings.py`. torch is imported only to
look at a device.
"""

from __future__ import annotations

from megaswift.base.byte_size import byte_size_or_none, bytes_text
from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.errors import ConfigError, Problem
from megaswift.memory.estimate import (
    MemoryEstimate,
    RunParameters,
    TrainedModel,
    communicator_bytes,
    uncovered_features,
    usable_bytes,
)
from megaswift.memory.objective import objective_of
from megaswift.memory.step_options import StepOptions
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import FITTED
from megaswift.options.values import option_value_text
from megaswift.parallel.hardware import gpu_of_device, planned_gpu
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.planner.machine import Machine
from megaswift.planner.settings import ALL, FitChoice, NoFit, Settings, choose_settings_that_fit
from megaswift.planner.step_time import TimeModel
from megaswift.trainers.options.batch_sizes import batch_plan

FIT = "--fit true"
DEFAULT_MACHINE = Machine(planned_gpu("h100"), 8)
"""For the order of the choice where a device is in no table."""


def fit_problems(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Report why this run cannot be fitted, as far as one process knows: where no memory is given, GPUs are asked on
    the ranks."""
    if not cfg.train.fit:
        return []
    if uncovered := list(uncovered_features(cfg.model, cfg.lora.adapters, cfg.parallel.tp_comm_overlap)):
        rule = f"the memory estimate does not cover {', '.join(uncovered)}"
        return [Problem(FIT, rule, "--fit false, and choose recompute_granularity and optimizer options yourself")]
    memory = _given_memory(cfg.train.device_memory)
    if memory is None:
        rule = "there is no CUDA device whose memory could be read"
        return [] if _cuda() else [Problem(FIT, rule, "--device_memory 80GiB, or --fit false")]
    chosen = _choice(cfg, spec, layout, memory)
    return [_no_fit_problem(cfg, chosen, memory, layout)] if isinstance(chosen, NoFit) else []


def fit_to_device(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> tuple[SwiftConfig, str]:
    """Choose settings that fit the device; return the configuration and the row of the run summary, the same on every
    rank.

    Without --fit nothing changes. Collective.

    Raises:
        ConfigError: nothing fits.
    """
    if not cfg.train.fit:
        return cfg, ""
    memory = _given_memory(cfg.train.device_memory) or _smallest_gpu()
    chosen = _choice(cfg, spec, layout, memory)
    if isinstance(chosen, NoFit):
        raise ConfigError(_no_fit_problem(cfg, chosen, memory, layout))
    usable = _usable(memory, layout, _cuda())
    return cfg.replace(**chosen.settings) if chosen.settings else cfg, fit_text(chosen, memory, usable)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _given_memory(device_memory: str | None) -> int | None:
    return None if device_memory is None else byte_size_or_none(device_memory)


def _smallest_gpu() -> int:
    """Memory of the smallest GPU of all ranks, so that all choose alike. Collective."""
    import torch

    from megaswift import distributed

    return -int(distributed.all_max([-float(torch.cuda.get_device_properties(0).total_memory)])[0])


def _choice(cfg: SwiftConfig, spec: ModelSpec, layout: Layout, memory: int) -> FitChoice | NoFit:
    from megaswift.run.engines import native_kernels

    kernels = native_kernels(cfg, spec, layout)
    split = PipelineSplit.from_config(cfg.parallel)
    parameters = TrainedModel.of(cfg.model, cfg.lora, spec, kernels).on(layout, split)

    return choose_settings_for_run(
        cfg, parameters, _usable(memory, layout, kernels.cuda), _machine(kernels.cuda, cfg.model.fp8_format is not None)
    )


def fit_advice(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> str:
    """Return what `--fit true` would choose on this process's GPU, after an out-of-memory error; empty where it would
    change nothing, or does not apply."""
    if cfg.train.fit or cfg.task not in FITTED or requested_engine(cfg) != NATIVE or not _cuda():
        return ""
    if any(uncovered_features(cfg.model, cfg.lora.adapters, cfg.parallel.tp_comm_overlap)):
        return ""
    chosen = _choice(cfg, spec, layout, _own_gpu())
    if isinstance(chosen, NoFit) or not chosen.settings:
        return ""
    need = f"{bytes_text(chosen.after.total)} by the estimate of docs/memory.md"
    return f"{settings_text(chosen.settings)}, which --fit true would choose: {need}; {cost_text(chosen)}"


def _own_gpu() -> int:
    """Memory of this process's GPU."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _usable(memory: int, layout: Layout, cuda: bool) -> int:
    return usable_bytes(memory, cuda) - (communicator_bytes(layout) if cuda else 0)


def _machine(cuda: bool, fp8: bool) -> Machine:
    """The first GPU's: all ranks choose alike where they have the same."""
    import torch

    gpu = gpu_of_device(torch.cuda.get_device_name(0)) if cuda else None
    return DEFAULT_MACHINE if gpu is None or not gpu.plannable else Machine(gpu, DEFAULT_MACHINE.gpus_per_node, fp8)


def choose_settings_for_run(
    cfg: SwiftConfig, parameters: RunParameters, usable: int, machine: Machine = DEFAULT_MACHINE
) -> FitChoice | NoFit:
    """Choose among the options that the user has not set; an explicit `none` is the user's choice too. Accumulation
    follows from a global batch that is set."""
    now = step_options(cfg, parameters.layout.dp)
    return choose_settings_that_fit(parameters, usable, now, settings_left_open(cfg), TimeModel(machine))


def settings_left_open(cfg: SwiftConfig) -> set[str]:
    """Return the settings that the user has left to a choice."""
    left_open = {n for n in ALL if n not in cfg.given and not (n in cfg.typed and cfg.value(n) is None)}
    if cfg.train.global_batch_size is not None:
        left_open.add("gradient_accumulation_steps")
    return left_open


def step_options(cfg: SwiftConfig, dp: int) -> StepOptions:
    """Collect the options that decide the memory of a step on `dp` data-parallel ranks."""
    plan = batch_plan(cfg.train, dp)
    tokens = cfg.data.max_tokens_per_batch
    if tokens is None:
        return micro_batch_options(cfg, plan.per_device, plan.accumulation)
    rows = -(-tokens // cfg.data.max_length)
    return micro_batch_options(cfg, rows, -(-plan.per_device * plan.accumulation // rows))


def micro_batch_options(cfg: SwiftConfig, rows: int, passes: int) -> StepOptions:
    """Collect the same for a step of so many micro-batches."""
    return StepOptions(
        cfg.model,
        cfg.optim,
        cfg.parallel.distributed_optimizer,
        rows=rows,
        passes=passes,
        max_length=cfg.data.max_length,
        lora_dropout=cfg.lora.lora_dropout,
        overlap_experts=cfg.parallel.overlap_moe_expert_parallel_comm,
        shares_rows=cfg.data.shares_rows,
        objective=objective_of(cfg),
    )


def settings_text(settings: Settings) -> str:
    """Write settings as flags, without those that are unset."""
    return " ".join(f"--{name} {option_value_text(value)}" for name, value in settings.items() if value != ())


def fit_text(chosen: FitChoice, memory: int, usable: int) -> str:
    """`estimate 127 GiB of ...`, then the choice and its reason."""
    room = f"{bytes_text(usable)} usable ({bytes_text(memory)} a device)"
    lines = [f"{estimate_text(chosen.after)}; {room}"]
    if chosen.settings:
        before = bytes_text(chosen.before.total)
        need = f"because the options as given would need {before}"
        lines.append(f"chosen: {settings_text(chosen.settings)}, {need}; {cost_text(chosen)}")
    else:
        lines.append("the options as given fit: nothing was changed")
    if chosen.settings.get("main_grads_dtype") == "bf16":
        lines.append("gradients of micro-batches and ranks are added up in bfloat16: --main_grads_dtype fp32 avoids it")
    if chosen.after.held.host:
        lines.append(f"host memory: {bytes_text(chosen.after.held.host)} a rank")
    return "\n".join(lines)


def cost_text(chosen: FitChoice) -> str:
    """Write what the choice costs of a step, by roofline."""
    change = chosen.seconds / chosen.seconds_before - 1
    if abs(change) < 0.005:
        return "by roofline a step takes as long"
    return f"by roofline a step takes {abs(change):.0%} {'longer' if change > 0 else 'less'}"


def estimate_text(estimate: MemoryEstimate) -> str:
    """Write the total of an estimate and its parts."""
    held = estimate.held
    activations = estimate.activations
    parts = {
        "weights": held.weights + held.first_values,
        **({"reference": held.reference} if held.reference else {}),
        **({"FP8 copies of weights": held.fp8_copies} if held.fp8_copies else {}),
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": activations.total,
    }
    listed = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return f"estimate {bytes_text(estimate.total)}: {listed}"


def _no_fit_problem(cfg: SwiftConfig, none: NoFit, memory: int, layout: Layout) -> Problem:
    room = bytes_text(_usable(memory, layout, _cuda()))
    rule = f"no settings fit {room} usable of a device with {bytes_text(memory)}; {estimate_text(none.before)}"
    if none.nearest:
        rule += f". With {settings_text(none.nearest)} it would still be {bytes_text(none.least.total)}"
    if none.then is not None:
        given = [f"--{name}" for name in none.given_up if name in cfg.given or name in cfg.typed]
        fix = (
            f"leave out {', '.join(given)}: with {settings_text(none.given_up)} the estimate is "
            f"{bytes_text(none.then.total)}"
        )
    elif none.least.held.device > none.least.activations.total:
        adapters = "--train_type lora, or " if cfg.model.train_type == "full" else ""
        fix = f"{adapters}more devices, with --tp or --pp"
    else:
        fix = f"--max_length {cfg.data.max_length // 2}, or more devices, with --tp or --cp"
    return Problem(FIT, rule, fix)
