"""`megaswift simulate`: the collectives, memory and pipeline of single ranks of a large run, on a machine without GPUs.

Owns the command: its options, and what of a run can be simulated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megaswift import log
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.commands.plan import described_model, planned_config
from megaswift.config import SwiftConfig
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.engine.options.engine_checks import AUTO, NATIVE, requested_engine
from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.engine.options.te import NEED_TRANSFORMER_ENGINE
from megaswift.errors import ConfigError, LayoutError, Problem
from megaswift.memory.estimate import TrainedModel, uncovered_features
from megaswift.models.spec import ModelSpec
from megaswift.options.spelling import errors_as_typed
from megaswift.options.values import option_value_text
from megaswift.parallel.checks import legal_layout
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.hardware import Gpu, planned_gpu
from megaswift.parallel.layout import PROCESSES, Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit, model_chunks_by_stage
from megaswift.planner.machine import Machine
from megaswift.planner.step_time import TimeModel
from megaswift.run.checks.fit import estimate_text, micro_batch_options
from megaswift.run.checks.layout_plan import planned_kernels
from megaswift.trainers.options.batch_sizes import batch_plan

if TYPE_CHECKING:
    from megaswift.simulator.report import Durations

USAGE = """\
Runs single ranks of a run of any size on this machine, one after the other: the real engine and schedule, on tensors
without memory, with process groups whose other ranks are not there. Shows the collectives of a step, their bytes by
link, live memory and the pipeline, and whether the ranks fit together. All options of training can be given:

  megaswift simulate run.yaml --world 1024
  megaswift simulate Qwen/Qwen3-8B --world 16 --tp 2 --pp 2 --max_length 4096 --gradient_accumulation_steps 8"""
DISAGREE = 1
"""The exit code where ranks do not fit together."""
TASKS = ("sft", "pt")
STATES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "store_param_remainders")
"""Options of the precision-aware optimizer."""


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code: 1 where ranks do not fit together."""
    given, rest = _parser().parse_known_args(list(argv))
    if problems := list(_problems(given)):
        raise ConfigError(problems)
    cfg = planned_config(given.what, given.task, rest)
    with errors_as_typed(cfg.typed, NAMES):
        if problems := list(_run_problems(cfg)):
            raise ConfigError(problems)
        spec = described_model(cfg)
        layout = _layout(cfg, spec, given.world)
        batch_plan(cfg.train, layout.dp)
    gpu = None if given.gpu is None else planned_gpu(given.gpu, given.hardware)
    ranks = _ranks(given.ranks)
    simulated, left_out = as_on_gpus(cfg)

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU would be computed on
    log.quiet_libraries()
    from megaswift.simulator.rank import SimulatedRun, representatives, simulate
    from megaswift.simulator.report import Simulation

    run = SimulatedRun(simulated, spec, layout, given.steps, left_out)
    traces = simulate(run, ranks or representatives(layout), log.info)
    durations, unit, forecast = _times(gpu, min(given.gpus_per_node, given.world), cfg, spec, layout, run.passes)
    title = f"{cfg.task} of {cfg.model.model} ({cfg.model.train_type}, {simulated.model.torch_dtype})"
    shown = Simulation(run, traces, min(given.gpus_per_node, given.world), title, durations, unit, forecast)
    print(shown.text())
    if given.output is not None:
        shown.write(Path(given.output))
        log.print_result(f"all calls in {given.output}, picture in {Path(given.output).with_suffix('.png')}")
    return DISAGREE if shown.found else 0


def _parser() -> UserErrorArgumentParser:
    parser = UserErrorArgumentParser(prog="megaswift simulate", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", metavar="MODEL|run.yaml", nargs="?", help="a model, or a run's configuration")
    parser.add_argument("--task", metavar="TASK", help="sft or pt (default: the file's, else sft)")
    parser.add_argument("--world", type=int, metavar="N", help="ranks of the run")
    parser.add_argument("--ranks", metavar="R,R,...", help="ranks to simulate (default: one of each class)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps; the last one is shown (default: 2)")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=int, default=8, metavar="M", help="GPUs of a node (default: 8)"
    )
    parser.add_argument("--gpu", metavar="NAME", help="time the pipeline by the roofline of this GPU: h100, h200, ...")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="figures of GPUs, as for megaswift plan")
    parser.add_argument("--output", metavar="FILE.json", help="write all calls, and a picture as FILE.png")
    return parser


def _problems(given: argparse.Namespace) -> Iterator[Problem]:
    if given.what is None:
        yield Problem("megaswift simulate", "needs a model or a run's file", "megaswift simulate run.yaml --world 64")
    if given.world is None:
        yield Problem("--world", "is missing", "--world 64")
    for name in ("world", "gpus_per_node", "steps"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            yield Problem(f"--{name} {value}", "is not a positive number", f"--{name} 8")
    if given.ranks is not None and given.world is not None:
        wrong = [r for r in given.ranks.split(",") if not (r.strip().isdigit() and int(r) < given.world)]
        if wrong:
            yield Problem(f"--ranks {given.ranks}", f"{wrong[0] or 'nothing'} is no rank of {given.world}", "--ranks 0")
    if given.output is not None and Path(given.output).suffix != ".json":
        yield Problem(f"--output {given.output}", "is not a file name ending in .json", "--output simulation.json")


def _ranks(text: str | None) -> list[int]:
    return [] if text is None else sorted({int(rank) for rank in text.split(",")})


def _run_problems(cfg: SwiftConfig) -> Iterator[Problem]:
    """Report what of a run cannot be simulated."""
    if cfg.task not in TASKS:
        yield Problem(f"--task {cfg.task}", "cannot be simulated: its steps depend on values", "--task sft or pt")
    if requested_engine(cfg) not in (NATIVE, AUTO):
        yield Problem(f"--engine {cfg.engine.engine}", "is not simulated; the native one is", "--engine megatron")
    m = cfg.model
    unsupported: dict[str, object] = {
        f"--train_type {m.train_type}": m.train_type == "qlora",
        f"--fp8_format {m.fp8_format}": m.fp8_format,
        "--tp_comm_overlap": cfg.parallel.tp_comm_overlap,
        "--moe_expert_capacity_factor": m.moe_expert_capacity_factor is not None,
        f"--moe_token_dispatcher_type {m.moe_token_dispatcher_type}": m.moe_token_dispatcher_type != "alltoall",
        f"--cuda_graph_impl {m.cuda_graph_impl}": m.cuda_graph_impl not in (None, "none"),
        "--optimizer_cpu_offload": cfg.optim.optimizer_cpu_offload,
        f"--optimizer {cfg.optim.optimizer}": cfg.optim.optimizer not in ("adam", "sgd"),
    }
    for option, used in unsupported.items():
        if used:
            yield Problem(option, "is not simulated", "leave it out")


def _layout(cfg: SwiftConfig, spec: ModelSpec, world: int) -> Layout:
    try:
        return legal_layout(ModelShape.of(spec), LayoutRequest.of(cfg.parallel, world, cfg.data.max_length, cfg.train))
    except LayoutError as error:
        named = [replace(p, fix=p.fix and p.fix.replace(PROCESSES, "(--world)")) for p in error.problems]
        raise LayoutError(named) from None


def as_on_gpus(cfg: SwiftConfig) -> tuple[SwiftConfig, tuple[str, ...]]:
    """Return the run with what it does by default on GPUs and with torch's layers, and the options that only
    Transformer Engine's have, which are left out."""
    parallel = cfg.parallel
    sharded = uses_distributed_optimizer(parallel.distributed_optimizer, cfg.optim.optimizer)
    reduce = parallel.overlap_grad_reduce is not False
    gather = parallel.overlap_param_gather
    options: dict[str, object] = {
        "engine": NATIVE,
        "torch_dtype": "bfloat16" if cfg.model.torch_dtype == "auto" else cfg.model.torch_dtype,
        "overlap_grad_reduce": reduce,
        "overlap_param_gather": (sharded and reduce) if gather is None else gather,
    }
    left_out = [n for n, *_, wants, _, _ in NEED_TRANSFORMER_ENGINE if n in cfg.given and wants(cfg.value(n))]
    texts = tuple(f"--{name} {option_value_text(cfg.value(name))}" for name in left_out)
    options |= {name: OPTIONS[name].default for name in left_out}
    if "precision_aware_optimizer" in left_out:
        options |= {name: OPTIONS[name].default for name in STATES}
    if "cp_comm_type" in left_out:
        options["hierarchical_context_parallel_sizes"] = ()
    if "recompute_modules" in left_out:
        rest = tuple(m for m in cfg.model.recompute_modules if m not in ("layernorm", "moe_act"))
        options |= {"recompute_modules": rest} if rest else {"recompute_granularity": None}
    return cfg.replace(**options, transformer_impl="torch"), texts


def _times(
    gpu: Gpu | None, gpus_per_node: int, cfg: SwiftConfig, spec: ModelSpec, layout: Layout, passes: int
) -> tuple[Durations, str, str]:
    """The time of passes, its unit, and the memory by formulas, in words."""
    split = PipelineSplit.from_config(cfg.parallel)
    stages = model_chunks_by_stage(spec.num_layers, layout, split)
    kernels = planned_kernels(cfg, spec)
    options = micro_batch_options(cfg, cfg.train.per_device_train_batch_size, passes)
    covered = not list(uncovered_features(cfg.model, cfg.lora.adapters, False))
    parameters = TrainedModel.of(cfg.model, cfg.lora, spec, kernels).on(layout, split) if covered else None
    forecast = "" if parameters is None else estimate_text(parameters.estimate(options))
    if gpu is None or parameters is None:
        layers = {(s, c): len(chunk.layers) for s, chunks in enumerate(stages) for c, chunk in enumerate(chunks)}
        return (
            lambda stage, p: layers[stage, p.chunk] * (1.0 if p.kind == "forward" else 2.0),
            "a layer's forward pass (backward: 2)",
            forecast,
        )
    machine = Machine(gpu, gpus_per_node)
    time = TimeModel(machine).on(parameters)
    seconds = {
        (s, c): time.of_chunk(options, chunk) for s, chunks in enumerate(stages) for c, chunk in enumerate(chunks)
    }
    return lambda stage, p: seconds[stage, p.chunk][p.kind == "backward"], "s", forecast
