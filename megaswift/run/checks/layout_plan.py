"""A run's configuration as a question for the planner, and a row of its answer as options. No torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import AUTO, NATIVE, requested_engine
from megaswift.errors import ConfigError, Problem
from megaswift.memory.estimate import TrainedModel, uncovered_features, usable_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels
from megaswift.models.spec import ModelSpec
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.te_attention import te_unsupported_attention_features
from megaswift.planner.machine import Machine
from megaswift.planner.search import AXES, SPLIT, Plan, Question, Row, search
from megaswift.run.checks.fit import settings_left_open, step_options
from megaswift.trainers.options.batch_sizes import batch_plan

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


def plan_problems(cfg: SwiftConfig, spec: ModelSpec) -> list[Problem]:
    """Report why a run cannot be planned."""
    problems = []
    if cfg.task not in ("sft", "pt"):
        problems.append(Problem(f"task {cfg.task}", "is not covered by the formulas of plans", "--task sft or pt"))
    if requested_engine(cfg) not in (NATIVE, AUTO):
        rule = "plans are for the native engine"
        problems.append(Problem(f"--engine {cfg.engine.engine}", rule, "--engine megatron, or leave it out"))
    if uncovered := list(uncovered_features(cfg.model, spec, cfg.lora.adapters, cfg.parallel.tp_comm_overlap)):
        rule = f"the memory estimate does not cover {', '.join(uncovered)}"
        problems.append(Problem(f"--model {cfg.model.model}", rule, "plan with a similar model, or without the option"))
    return problems


def global_batch_rows(cfg: SwiftConfig, gpus: int) -> tuple[int, bool]:
    """Return the rows of a step, and whether the options say how many: where a layout leaves their number open, that of
    the layout as it is given."""
    if cfg.train.global_batch_size is not None:
        return cfg.train.global_batch_size, True
    request = LayoutRequest.of(cfg.parallel, gpus, cfg.data.max_length, cfg.train)
    if set(BATCH_OPTIONS) & cfg.given and request.known_dp is not None:
        return batch_plan(cfg.train, request.known_dp).global_batch_size, True
    return ROWS_PER_GPU * gpus, False


def planning_question(
    cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int, fixed: Collection[str], left_open: Collection[str]
) -> Question:
    """Return the question of this run on so many GPUs.

    Args:
        fixed: Options of layout and micro-batch that stay as they are.
        left_open: Settings that may change.
    """
    kernels = planned_kernels(cfg, spec)
    return Question(
        TrainedModel.of(cfg.model, cfg.lora, spec, kernels),
        machine,
        gpus,
        usable_bytes(machine.memory, kernels.cuda),
        step_options(cfg.replace(global_batch_size=None, gradient_accumulation_steps=None), 1),
        global_batch_rows(cfg, gpus)[0],
        LayoutRequest.of(cfg.parallel, gpus, cfg.data.max_length, cfg.train),
        fixed,
        left_open,
    )


def plan_run(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int, wanted: int = 20) -> Plan:
    """Return the fastest layouts of a run that fit. What the user has set stays.

    Raises:
        ConfigError: The formulas do not cover the run.
    """
    if problems := plan_problems(cfg, spec):
        raise ConfigError(problems)
    fixed = {name for name in (*AXES.values(), *SPLIT, "per_device_train_batch_size") if name in cfg.given}
    left_open = settings_left_open(cfg)
    for spared in (LAST_RESORTS, LAST_RESORTS[1:], ()):
        question = planning_question(cfg, spec, machine, gpus, fixed, left_open.difference(spared))
        if (plan := search(question, wanted)).rows:
            break
    return plan


def row_as_given(cfg: SwiftConfig, spec: ModelSpec, machine: Machine, gpus: int) -> Plan:
    """Return the plan of the run's own layout and settings alone."""
    fixed = {*AXES.values(), *SPLIT, "per_device_train_batch_size"}
    return search(planning_question(cfg, spec, machine, gpus, fixed, ()), 1)


def options_of_row(row: Row) -> dict[str, Any]:
    """Return the options of a row as they are written: without those that are empty."""
    return {name: value for name, value in row.options().items() if value != ()}
