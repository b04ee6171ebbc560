"""`megaswift bisect RUN`: one optimizer step of a run against a reference; names the first tensor that differs."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megaswift import log
from megaswift.base.atomic_writes import write_atomically
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.commands.training import process_count
from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import AUTO, NATIVE, requested_engine
from megaswift.errors import ConfigError, Problem, UserError, missing_path_hint
from megaswift.options.tasks import SUPERVISED
from megaswift.parallel.layout import Layout, requested_axis_sizes, size_problems

if TYPE_CHECKING:
    from megaswift.bisection.compare import Comparison
    from megaswift.bisection.trace_folder import Trace

DIFFERENT = 1
"""Exit code; 0: no difference, 2: a mistake in the command."""
MOST_RANKS = 16
INDEX = "trace.json"
CONFIG = "config.yaml"
HUGGING_FACE = "hf"
AXES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
UNKNOWN_TO_THE_REFERENCE = {
    "model": (
        "freeze_parameters",
        "trainable_parameters",
        "fp8_format",
        "moe_expert_capacity_factor",
        "rope_scaling",
        "new_special_tokens",
        "megatron_extra_kwargs",
        "megatron_architecture",
    ),
    "train": ("enable_dft_loss", "neftune_noise_alpha"),
}
"""Options, by part of the configuration, that change what a step computes; unset they are false."""
DESCRIPTION = """\
Run one optimizer step of a run's own configuration and data on processes of this machine (CPU, gloo), record its
tensors, and compare them with the Hugging Face model on one process. Prints the first tensor that differs beyond
rounding, in the order of computation. Further words are options of the run: --torch_dtype float32.
"""


def main(argv: list[str]) -> int:
    """Compare, print, and write the page; returns the exit code."""
    log.quiet_libraries()
    parser = UserErrorArgumentParser(prog="megaswift bisect", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="a YAML file of a run, or the folder of a trace")
    parser.add_argument(
        "--against",
        metavar="hf|RUN_DIR|TRACE",
        default=HUGGING_FACE,
        help="the reference: Hugging Face, the configuration in the folder of a run, or a trace; default: hf",
    )
    parser.add_argument("--layout", help='sizes in place of the run\'s own, for example "tp2 pp2 cp2 dp2 sp"')
    parser.add_argument("--layers", type=int, help="only the first so many layers of the model")
    parser.add_argument("--model", metavar="DIR", help="the model folder, where RUN is a trace")
    parser.add_argument("--output", type=Path, default=Path("bisect"), help="folder for the report; default: bisect")
    parser.add_argument("--keep_trace", action="store_true", help="leave the trace in the folder of the report")
    given, words = parser.parse_known_args(argv)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="megaswift-bisect-") as scratch:
        found, trace = _compare(given, words, Path(scratch))
        if given.keep_trace and (Path(scratch) / "trace").exists():
            kept = given.output / "trace"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(Path(scratch) / "trace", kept, ignore=shutil.ignore_patterns("run"))
    from megaswift.bisection.page import page
    from megaswift.bisection.report import report_json, screen

    layout = trace.layout
    against = "Hugging Face" if given.against == HUGGING_FACE else given.against
    given.output.mkdir(parents=True, exist_ok=True)
    write_atomically(given.output / "bisect.json", json.dumps(report_json(found, layout, against), indent=1))
    write_atomically(given.output / "bisect.html", page(found, layout, against))
    print(screen(found, layout, against))
    if found.first is None and trace.about["dtype"] == "bfloat16":
        print("in bfloat16, whose rounding hides smaller differences: --torch_dtype float32 shows those of one in 10^5")
    print(f"{given.output}/bisect.html, {given.output}/bisect.json ({time.perf_counter() - begin:.0f} s)")
    return 0 if found.first is None else DIFFERENT


def _compare(given: argparse.Namespace, words: list[str], scratch: Path) -> tuple[Comparison, Trace]:
    """Record what has to be recorded, then compare."""
    if not given.run.exists():
        raise UserError(Problem(str(given.run), "does not exist", missing_path_hint(given.run)))
    if (given.run / INDEX).exists():
        return _compare_trace(given, words)
    if given.model is not None:
        words = [*words, "--model", given.model]
    if given.run.is_dir():
        raise UserError(Problem(str(given.run), f"is no trace: {INDEX} is missing", "the YAML file of a run"))
    cfg = load_config(None, [str(given.run), *words], complete=True)
    cfg, layout = _on_this_machine(cfg, given.layout, given.layers, scratch)
    other, other_cfg = _other(given, words, scratch)

    from megaswift.bisection.recording import MODEL, record_on_processes

    folder = scratch / "trace"
    log.info(f"one step on {log.count_text(layout.world_size, 'process')}: {layout.describe()}")
    record_on_processes(cfg, layout, folder)
    if other_cfg is not None:
        log.info(f"the reference's step: {other_cfg[1].describe()}")
        other = scratch / "other"
        record_on_processes(other_cfg[0], other_cfg[1], other)
    drawn = folder / MODEL
    model = drawn if drawn.exists() else Path(json.loads((folder / INDEX).read_text())["model"])
    return _judged(folder, model, cfg, other)


def _compare_trace(given: argparse.Namespace, words: list[str]) -> tuple[Comparison, Trace]:
    """RUN is a trace that another program may have written."""
    problems = []
    if given.model is None:
        fix = "--model DIR, its Hugging Face folder"
        problems.append(Problem("--model", f"is missing: {given.run} is a trace", fix))
    for name in ("layout", "layers"):
        if getattr(given, name) is not None:
            problems.append(Problem(f"--{name}", f"has no effect: {given.run} is a trace", "leave it out"))
    if problems:
        raise ConfigError(problems)
    against = None if given.against == HUGGING_FACE else Path(given.against)
    cfg = load_config("sft", ["--model", given.model, *words])
    return _judged(given.run, Path(given.model), cfg, against)


def _judged(folder: Path, model: Path, cfg: SwiftConfig, other: Path | None) -> tuple[Comparison, Trace]:
    from megaswift.bisection.judge import judge
    from megaswift.bisection.trace_folder import Trace

    log.info("Hugging Face on one process, and five times from perturbed weights")
    begin = time.perf_counter()
    trace = Trace.open(folder)
    found = judge(trace, model, cfg, None if other is None else Trace.open(other))
    log.info(f"compared in {time.perf_counter() - begin:.0f} s")
    return found, trace


def _other(
    given: argparse.Namespace, words: list[str], scratch: Path
) -> tuple[Path | None, tuple[SwiftConfig, Layout] | None]:
    """The trace to compare with, or the run whose step is to be recorded for that."""
    if given.against == HUGGING_FACE:
        return None, None
    folder = Path(given.against)
    if (folder / INDEX).exists():
        return folder, None
    if not (folder / CONFIG).exists():
        rule = "is neither hf, nor the folder of a run (config.yaml), nor a trace (trace.json)"
        hint = "--against hf" if folder.exists() else missing_path_hint(folder)
        raise ConfigError(Problem(f"--against {given.against}", rule, hint))
    cfg = load_config(None, [str(folder / CONFIG), *words], complete=True)
    return None, _on_this_machine(cfg, None, given.layers, scratch / "second")


def _on_this_machine(
    cfg: SwiftConfig, layout: str | None, layers: int | None, scratch: Path
) -> tuple[SwiftConfig, Layout]:
    """The configuration for processes of this machine.

    Raises:
        ConfigError: Bisect cannot record such a run.
    """
    sizes, sequence, world = _sizes(cfg, layout)
    problems = []
    if cfg.task not in SUPERVISED:
        rule = "is not recorded: bisect compares steps of sft and pt"
        problems.append(Problem(f"megaswift {cfg.task}", rule, "give the configuration or folder of such a run"))
    if cfg.model.train_type not in ("full", "lora"):
        fix = "--train_type lora, or full"
        problems.append(Problem(f"--train_type {cfg.model.train_type}", "is not recorded", fix))
    if cfg.model.train_type == "lora" and cfg.lora.lora_dropout:
        rule = "is drawn at random, so that no reference computes the same"
        problems.append(Problem(f"--lora_dropout {cfg.lora.lora_dropout}", rule, "--lora_dropout 0"))
    if layers is not None and cfg.lora.adapters is not None:
        rule = f"does not cut the adapters of --adapters {cfg.lora.adapters}"
        problems.append(Problem(f"--layers {layers}", rule, "leave --layers out"))
    engine = requested_engine(cfg)
    if cfg.model.train_type == "lora" and engine not in (NATIVE, AUTO):
        rule = "is recorded with --train_type full only"
        problems.append(Problem(f"--engine {engine}", rule, f"--engine {NATIVE}"))
    if layout is not None and engine not in (NATIVE, AUTO) and max(sizes.values()) > 1:
        rule = f"is not a layout of --engine {engine}, which has data parallelism only"
        problems.append(Problem(f'--layout "{layout}"', rule, f'--layout "dp{world}", or --engine {NATIVE}'))
    for part, names in UNKNOWN_TO_THE_REFERENCE.items():
        set_here = [name for name in names if getattr(getattr(cfg, part), name)]
        problems += [Problem(f"--{name}", "is unknown to the reference", "leave it out") for name in set_here]
    if world > MOST_RANKS:
        fix = '--layout "tp2 pp2", a smaller one of the same kind'
        problems.append(Problem(f"{world} processes", f"are more than the {MOST_RANKS} that bisect starts", fix))
    problems += size_problems(world, {axis: sizes[axis] for axis in AXES})
    if problems:
        raise ConfigError(problems)
    options: dict[str, object] = {name: sizes[axis] for axis, name in AXES.items()}
    options["virtual_pipeline_parallel_size"] = sizes["vpp"] if sizes["vpp"] > 1 else None
    if layout is not None:
        options |= {"sequence_parallel": sequence, "pipeline_layout": None}
        options |= {"first_stage_layers": None, "last_stage_layers": None}
    options |= {
        "engine": NATIVE if cfg.model.train_type == "lora" else engine,
        "nproc_per_node": None,
        "nnodes": None,
        "output_dir": str(scratch / "out"),
    }
    if layers is not None:
        from megaswift.bisection.first_layers import write_first_layers
        from megaswift.folders.source import locate_model

        source = locate_model(cfg.model, weights=not cfg.model.random_init, verify=False)
        options["model"] = str(write_first_layers(source, scratch / "model", layers, not cfg.model.random_init))
    changed = cfg.replace(**options)
    if options["engine"] != NATIVE:
        from megaswift.run.checks.engine_choice import resolve_engine

        changed = resolve_engine(changed, world)
    if changed.model.mtp_num_layers:
        from megaswift.bisection.ahead import check_reference
        from megaswift.folders.source import locate_model

        check_reference(locate_model(changed.model, weights=False, verify=False))
    return changed, Layout.from_config(changed.parallel, world)


def _sizes(cfg: SwiftConfig, layout: str | None) -> tuple[dict[str, int], bool | None, int]:
    """(sizes of the axes, sequence parallelism, processes) that the words of `--layout` or the run's options name."""
    if layout is None:
        sizes = requested_axis_sizes(cfg.parallel)
        least = sizes["tp"] * sizes["pp"] * sizes["cp"]
        return sizes, cfg.parallel.sequence_parallel, max(process_count(cfg.launch), least)
    sizes = dict.fromkeys(AXES, 1)
    dp = 1
    sequence: bool | None = None
    for word in layout.replace(",", " ").split():
        match = re.fullmatch(r"([a-z]+)(\d+)", word)
        if word in ("sp", "nosp"):
            sequence = word == "sp"
        elif match is not None and match[1] == "dp":
            dp = int(match[2])
        elif match is not None and match[1] in AXES:
            sizes[match[1]] = int(match[2])
        else:
            known = ", ".join([f"{axis}2" for axis in (*AXES, "dp")])
            raise ConfigError(Problem(f"--layout: {word}", f"is none of {known}, sp, nosp", '--layout "tp2 pp2"'))
    return sizes, sequence, sizes["tp"] * sizes["pp"] * sizes["cp"] * dp
