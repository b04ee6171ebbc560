"""A run's configuration as a question for the planner, and a row of its answer as options: `--layout auto`, and the row
of `megaswift submit`.

torch is imported only to look at a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megaswift import log
from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.engine.options.cuda_graphs import cuda_graph_model_problems
from megaswift.engine.options.engine_checks import AUTO, NATIVE, requested_engine, uses_model_parallelism
from megaswift.engine.options.fp8_recipes import fp8_compute_capability_problems
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.folders.source import locate_model
from megaswift.memory.estimate import TrainedModel, uncovered_features, usable_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels
from megaswift.memory.rollout_bytes import VLLM
from megaswift.memory.torch_estimate import KINDS, uncovered_torch_runs
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import FITTED, PLANNED, RL
from megaswift.options.values import option_value_text
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.hardware import Gpu, planned_gpu
from megaswift.parallel.te_attention import te_unsupported_attention_features
from megaswift.planner.machine import Machine
from megaswift.planner.search import AXES, SPLIT, Plan, Question, Row, search
from megaswift.run.checks.fit import estimate_text, micro_batch_options, settings_left_open, settings_text
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.trainers.options.batch_sizes import batch_plan
from megaswift.trainers.rl.options.derived import generations_per_prompt_of, samples_ahead

IMBALANCE = 1.25
"""Of experts. An assumption, not measured here."""
ROWS_PER_GPU = 4
"""Rows of a step for each GPU where no option says how many."""
BATCH_OPTIONS = ("global_batch_size", "gradient_accumulation_steps", "per_device_train_batch_size")
LAST_RESORTS = ("main_grads_dtype", "optimizer_cpu_offload")
"""Settings that change how gradients add up, or wait for host memory: the first is tried where nothing fits without,
then both."""


def planned_kernels(cfg: SwiftConfig, spec: ModelSpec) -> ComputeKernels:
    """Return whose kernels compute on GPUs with Transformer Engine; torch_dtype auto is bfloat16."""
    own = te_unsupported_attention_features(spec, None, cfg.data.shares_rows)
    torch_layers = cfg.model.transformer_impl == TORCH
    linear = TORCH if torch_layers or cfg.model.train_type == "qlora" else TRANSFORMER_ENGINE
    attention = TORCH if torch_layers or own or cfg.model.attn_impl == "sdpa" else TRANSFORMER_ENGINE
    dtype = "bfloat16" if cfg.model.torch_dtype == "auto" else cfg.model.torch_dtype
    return ComputeKernels(linear, attention, dtype, True)


def plan_problems(cfg: SwiftConfig, spec: ModelSpec, machine: Machine) -> list[Problem]:
    """Report why a run cannot be planned."""
    problems = []
    if cfg.task not in PLANNED:
        fix = did_you_mean_hint(cfg.task, PLANNED) or f"one of {', '.join(PLANNED)}"
        problems.append(Problem(f"--task {cfg.task}", "is not a task that plans cover", fix))
    problems += _without_fp8(cfg, machine)
    engine = requested_engine(cfg)
    if engine in KINDS:
        if torch_runs := list(uncovered_torch_runs(cfg.task, cfg.model, cfg.lora, cfg.optim, spec)):
            rule = f"plans of this engine do not cover {', '.join(torch_runs)}"
            problems.append(Problem(f"--engine {engine}", rule, "--engine megatron, or leave it out"))
        return problems
    if engine not in (NATIVE, AUTO):
        rule = f"plans are for the engines megatron, {', '.join(KINDS)}"
        problems.append(Problem(f"--engine {engine}", rule, "--engine megatron, or leave it out"))
    if cfg.task in RL and samples_ahead(cfg):
        what = "--async_generation true" if cfg.rollout.async_generation else "--max_staleness"
        problems.append(Problem(what, "plans are for generation and training in turn", "leave it out"))
    problems += cuda_graph_model_problems(cfg, spec.transformer)
    if uncovered := list(uncovered_features(cfg.model, cfg.lora.adapters, cfg.parallel.tp_comm_overlap)):
        rule = f"the memory estimate does not cover {', '.join(uncovered)}"
        problems.append(Problem(f"--model {cfg.model.model}", rule, "plan with a similar model, or without the option"))
    return problems


def _without_fp8(cfg: SwiftConfig, machine: Machine) -> list[Problem]:
    if cfg.model.fp8_format is None:
        return []
    if machine.gpu.fp8_tflops is not None:
        recipe = cfg.model.fp8_recipe
        able = machine.gpu.capability
        return [] if able is None else fp8_compute_capability_problems(recipe, able, machine.gpu.name)
    rule = f"{machine.gpu.name} has no FP8 in the table of GPUs"
    return [Problem(f"--fp8_format {cfg.model.fp8_format}", rule, "another GPU, or leave it out")]


def global_batch_rows(cfg: SwiftConfig, gpus: int) -> tuple[int, bool]:
    """Return the rows of a step, and whether the options say how many: where a layout leaves their number open, that of
    the layout as it is given."""
    if cfg.train.global_batch_size is not None:
        return cfg.train.global_batch_size, True
    request = LayoutRequest.of(cfg.parallel, gpus, cfg.data.max_length, cfg.train)
    if set(BATCH_OPTIONS) & cfg.given and request.known_dp is not None:
        return batch_plan(cfg.train, request.known_dp).global_batch_size, True
    whole = generations_per_prompt_of(cfg) if cfg.task in RL else 1  # groups of completions
    return math.lcm(ROWS_PER_GPU * gpus, whole), False


def planning_question(
    cfg: SwiftConfig,
    spec: ModelSpec,
    machine: Machine,
    gpus: int,
    fixed: Collection[str],
    left_open: Collection[str],
    imbalance: float = IMBALANCE,
    engines: Collection[str] = (NATIVE,),
) -> Question:
    """Return the question of this run on so many GPUs.

    Args:
        fixed: Options of layout and micro-batch that stay as they are.
        left_open: Settings that may change.
        imbalance: Tokens of the fullest expert-parallel rank over those of an even choice.
        engines: Engines that are compared.
    """
    cfg = with_planned_sampler(cfg)
    kernels = planned_kernels(cfg, spec)
    if cfg.model.uses_cuda_graphs:
        fixed = {*fixed, "context_parallel_size"}
    options = micro_batch_options(cfg, cfg.train.per_device_train_batch_size, 1)
    make = TrainedModel.with_critic if options.objective.critic else TrainedModel.of
    return Question(
        make(cfg.model, cfg.lora, spec, kernels),
        machine,
        gpus,
        usable_bytes(machine.memory, kernels.cuda),
        replace(options, expert_imbalance=imbalance, device_memory=machine.memory),
        global_batch_rows(cfg, gpus)[0],
        LayoutRequest.of(cfg.parallel, gpus, cfg.data.max_length, cfg.train),
        fixed,
        left_open,
        engines,
    )


def with_planned_sampler(cfg: SwiftConfig) -> SwiftConfig:
    """Return the run with vLLM in its processes where no option names the sampler, as on GPUs that have it."""
    return cfg.replace(rollout_backend=VLLM) if cfg.task in RL and "rollout_backend" not in cfg.given else cfg


def engines_to_compare(cfg: SwiftConfig, spec: ModelSpec) -> tuple[str, ...]:
    """Return the engines of a plan: the one that the options name; the native one, and where no option belongs to it
    alone, those of torch that the formulas cover."""
    asked = requested_engine(cfg)
    if asked in KINDS:
        return (asked,)
    named = "engine" in cfg.given and asked == NATIVE
    uncovered = uncovered_torch_runs(cfg.task, cfg.model, cfg.lora, cfg.optim, spec)
    return (NATIVE,) if named or uses_model_parallelism(cfg) or any(uncovered) else (NATIVE, *KINDS)


def plan_run(
    cfg: SwiftConfig,
    spec: ModelSpec,
    machine: Machine,
    gpus: int,
    wanted: int = 20,
    imbalance: float = IMBALANCE,
    engines: Collection[str] = (NATIVE,),
) -> Plan:
    """Return the fastest layouts of a run that fit. What the user has set stays.

    Raises:
        ConfigError: The formulas do not cover the run.
    """
    if problems := plan_problems(cfg, spec, machine):
        raise ConfigError(problems)
    fixed = {name for name in (*AXES.values(), *SPLIT, "per_device_train_batch_size") if name in cfg.given}
    left_open = settings_left_open(cfg)
    for spared in (LAST_RESORTS, LAST_RESORTS[1:], ()):
        question = planning_question(cfg, spec, machine, gpus, fixed, left_open.difference(spared), imbalance, engines)
        if (plan := search(question, wanted)).rows:
            break
    return plan


def row_as_given(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int) -> Plan:
    """Return the plan of the run's own layout alone, with its own settings or those that `--fit true` would choose."""
    fixed = {*AXES.values(), *SPLIT, "per_device_train_batch_size"}
    left_open = settings_left_open(cfg) if cfg.train.fit else ()
    asked = requested_engine(cfg)
    engines = (asked if asked in KINDS else NATIVE,)
    return search(planning_question(cfg, spec, machine, gpus, fixed, left_open, engines=engines), 1)


def options_of_row(cfg: SwiftConfig, row: Row) -> dict[str, Any]:
    """Return the options of a row as they are written: without those that are empty, and with the engine and the
    precision that a plan takes for granted."""
    taken = {"engine": row.engine, **({"torch_dtype": "bfloat16"} if cfg.model.torch_dtype == "auto" else {})}
    sampled = cfg.task in RL and "rollout_backend" not in cfg.given
    sampler = {"rollout_backend": VLLM} if sampled else {}
    return {**{name: value for name, value in row.options().items() if value != ()}, **taken, **sampler}


def row_text(row: Row, usable: int) -> str:
    """Write a row in one line."""
    engine = "" if row.engine == NATIVE else f"{row.engine} "
    batches = f"{log.count_text(row.passes, 'micro-batch', '')} of {row.rows}"
    return (
        f"{engine}{row.layout.describe()}, {batches}: {bytes_text(row.needed)} of "
        f"{bytes_text(usable)} usable; by roofline, not measured: a step takes {row.time.total:.2f} s, "
        f"{row.tokens:.0f} tokens/s/GPU, bubble {row.time.bubble / row.time.total:.0%}"
    )


def too_large_problem(plan: Plan, advice: str = "") -> Problem:
    """Report that nothing fits, with what is nearest.

    Args:
        advice: What to try first.
    """
    q = plan.question
    what = f"{q.gpus} x {q.machine.gpu.name}"
    if not plan.too_large:
        rules = [rule for rule, _ in plan.refused.most_common(1)]
        return Problem(what, f"no layout is legal: {rules[0] if rules else 'none divides the GPUs'}", "other sizes")
    row = min(plan.too_large, key=lambda row: row.needed)
    room = f"{bytes_text(q.usable)} usable of a GPU"
    rule = f"nothing fits {room}: {row.layout.describe()} needs {estimate_text(row.memory).removeprefix('estimate ')}"
    if row.communicators:
        rule += f", and communicators {bytes_text(row.communicators)}"
    fix = "more GPUs, --train_type lora, or a shorter --max_length; megaswift plan shows the parts"
    return Problem(what, rule, advice + fix)


def planned_layout(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int) -> tuple[dict[str, Any], str]:
    """Choose the layout and the settings of `--layout auto`; return them as options, with a line about them.

    Raises:
        ConfigError: Nothing fits, or the formulas do not cover the run.
    """
    plan = plan_run(cfg, spec, machine, gpus, 1)
    if not plan.rows:
        raise ConfigError(too_large_problem(plan))
    row = plan.rows[0]
    return {**options_of_row(cfg, row), "layout": "given", "planned_gpu": None}, row_text(row, plan.question.usable)


def forecast_text(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int) -> str:
    """Write what the run's own layout needs and takes; of `--fit true` with the settings that it would choose.

    Raises:
        ConfigError: It does not fit, or computes in FP8 and the GPU does not.
    """
    if impossible := _without_fp8(cfg, machine):
        raise ConfigError(impossible)
    if uncovered := plan_problems(cfg, spec, machine):
        return f"none ({uncovered[0].what}: {uncovered[0].rule})"
    plan = row_as_given(cfg, spec, machine, gpus)
    if not plan.rows:
        raise ConfigError(too_large_problem(plan, _fit_advice(cfg, spec, machine, gpus)))
    row = plan.rows[0]
    chosen = f", with {settings_text(row.settings)}" if row.settings else ""
    return row_text(row, plan.question.usable) + chosen


def _fit_advice(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int) -> str:
    """Return what `--fit true` would choose; empty where it chooses nothing."""
    if cfg.train.fit or cfg.task not in FITTED or requested_engine(cfg) not in (NATIVE, AUTO):
        return ""
    fitted = row_as_given(cfg.replace(fit=True), spec, machine, gpus).rows
    return f"--fit true, which would choose {settings_text(fitted[0].settings)}; or " if fitted else ""


def resolve_layout(cfg: SwiftConfig, gpus: int, gpus_per_node: int, tell: bool) -> tuple[SwiftConfig, list[str]]:
    """Choose the layout where `--layout auto` leaves it open; return the configuration, and the words that repeat the
    choice in other processes.

    Raises:
        ConfigError: The GPU is not known, or nothing fits.
    """
    if cfg.parallel.layout != "auto":
        return cfg, []
    machine = Machine(_gpu(cfg.parallel.planned_gpu), min(gpus, gpus_per_node), cfg.model.fp8_format is not None)
    spec = model_spec_for_task(cfg, locate_model(cfg.model, weights=False))
    options, text = planned_layout(cfg, spec, machine, gpus)
    if tell:
        log.info(f"layout auto: {text}")
    return cfg.replace(**options), words_of(options)


def words_of(options: dict[str, Any]) -> list[str]:
    """Write options as words of a command line."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", *option_value_text("none" if value is None else value).split())
    ]


def _gpu(name: str | None) -> Gpu:
    """The row of the named GPU, with this machine's memory if it has one."""
    import torch

    if not torch.cuda.is_available():
        if name is None:
            rule = "there is no CUDA device to choose a layout for"
            raise ConfigError(Problem("--layout auto", rule, "--planned_gpu h100"))
        return planned_gpu(name, option="--planned_gpu")
    device = torch.cuda.get_device_properties(0)
    return replace(planned_gpu(name or device.name, option="--planned_gpu"), memory_gib=device.total_memory / 2**30)
