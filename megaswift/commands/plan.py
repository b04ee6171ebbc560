"""`megaswift plan`: layouts of a run on a number of GPUs, with memory and time, before there is a GPU.

Owns the command: its options and the model that a name stands for. Tables, files and the picture are
`plan_report.py`'s.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megaswift import log
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.commands.plan_report import PlanReport
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError, Problem
from megaswift.folders.source import locate_model
from megaswift.models.published.sizes import MODELS, published_model
from megaswift.models.spec import ModelSpec
from megaswift.options.spelling import errors_as_typed
from megaswift.parallel.hardware import hardware_yaml, planned_gpu
from megaswift.planner.machine import Machine
from megaswift.run.checks.layout_plan import IMBALANCE, engines_to_compare, global_batch_rows, options_of_row, plan_run
from megaswift.run.checks.model_spec import model_spec_for_task

USAGE = """\
Searches layouts and settings of a run on GPUs that need not be there, and ranks those that fit by tokens per second.
Memory is that of the formulas of docs/memory.md. Time is a roofline: shares of the data sheets' rates.
MODEL is a folder, a config.json or the name of a published model; in its place a run's file, whose options stay as they
are. All options of training can be given:

  megaswift plan Qwen/Qwen3-8B --gpus 8 --gpu h100 --task sft --max_length 4096
  megaswift plan run.yaml --gpus 512 --gpu h100 --yaml planned.yaml --row 2"""
NOTHING_FITS = 1


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code: 1 where nothing fits."""
    given, rest = _parser().parse_known_args(list(argv))
    if given.show_hardware:
        print(hardware_yaml(), end="")
        return 0
    if problems := list(_problems(given)):
        raise ConfigError(problems)
    gpu = planned_gpu(given.gpu, given.hardware)
    if given.network_gbps is not None:
        gpu = replace(gpu, network_gbs=given.network_gbps / 8)
    cfg = planned_config(given.what, given.task, rest)
    machine = Machine(gpu, min(given.gpus_per_node, given.gpus), cfg.model.fp8_format is not None)
    with errors_as_typed(cfg.typed, NAMES):
        wanted = max(given.top, given.row)
        spec = described_model(cfg)
        engines = engines_to_compare(cfg, spec)
        plan = plan_run(cfg, spec, machine, given.gpus, wanted, given.expert_imbalance, engines)
    if plan.rows and given.row > len(plan.rows):
        rule = f"no such row: {len(plan.rows)} fit"
        raise ConfigError(Problem(f"--row {given.row}", rule, f"--row {len(plan.rows)}"))
    report = PlanReport(plan, cfg, given.storage_gbps, global_batch_rows(cfg, given.gpus)[1])
    print(report.text(given.top, given.row))
    if given.output is not None:
        report.write(Path(given.output))
        log.print_result(f"figures in {given.output}, picture in {Path(given.output).with_suffix('.png')}")
    if not plan.rows:
        return NOTHING_FITS
    if given.yaml is not None:
        report.write_run_file(Path(given.yaml), options_of_row(cfg, plan.rows[given.row - 1]))
        log.print_result(f"row {given.row} as a run's file: {given.yaml}")
    return 0


def _parser() -> UserErrorArgumentParser:
    parser = UserErrorArgumentParser(prog="megaswift plan", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", metavar="MODEL|run.yaml", nargs="?", help="a model, or a run's configuration")
    parser.add_argument("--task", metavar="TASK", help="sft, pt, dpo, rm, grpo, ... (default: the file's, else sft)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all")
    parser.add_argument("--gpu", metavar="NAME", help="h100, h200, b200, ...: a row of the table of GPUs")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=int, default=8, metavar="M", help="GPUs of a node (default: 8)"
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="YAML with other figures, or GPUs of your own")
    parser.add_argument(
        "--show_hardware", "--show-hardware", action="store_true", help="print the table of GPUs as such a file"
    )
    parser.add_argument(
        "--network_gbps",
        "--network-gbps",
        type=float,
        metavar="GBPS",
        help="a GPU's share of the network between nodes in Gbit/s (default: the table's)",
    )
    parser.add_argument(
        "--storage_gbps",
        "--storage-gbps",
        type=float,
        metavar="GBPS",
        help="rate at which all nodes together write checkpoints, in Gbit/s: adds the seconds of a checkpoint",
    )
    parser.add_argument(
        "--expert_imbalance",
        "--expert-imbalance",
        type=float,
        default=IMBALANCE,
        metavar="X",
        help=f"tokens of the fullest expert-parallel rank over an even choice of experts (default: {IMBALANCE})",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (default: 10)")
    parser.add_argument("--row", type=int, default=1, metavar="N", help="the row whose parts are shown (default: 1)")
    parser.add_argument("--yaml", metavar="FILE", help="write that row as a run's configuration")
    parser.add_argument("--output", metavar="FILE.json", help="write all figures, and a picture as FILE.png")
    return parser


def _problems(given: argparse.Namespace) -> Iterator[Problem]:
    if given.what is None:
        yield Problem(
            "megaswift plan", "needs a model or a run's file", "megaswift plan Qwen/Qwen3-8B --gpus 8 --gpu h100"
        )
    if given.gpus is None:
        yield Problem("--gpus", "is missing", "--gpus 8")
    if given.gpu is None:
        yield Problem("--gpu", "is missing", "--gpu h100")
    for name in ("gpus", "gpus_per_node", "top", "row", "network_gbps", "storage_gbps"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            yield Problem(f"--{name} {value}", "is not a positive number", f"--{name} 8")
    if given.expert_imbalance < 1:
        rule = "is less than 1, an even choice of experts"
        yield Problem(f"--expert_imbalance {given.expert_imbalance:g}", rule, f"--expert_imbalance {IMBALANCE}")
    if given.gpus and 0 < given.gpus_per_node < given.gpus and given.gpus % given.gpus_per_node:
        rule = f"is no multiple of --gpus_per_node {given.gpus_per_node}"
        yield Problem(f"--gpus {given.gpus}", rule, f"--gpus {given.gpus // given.gpus_per_node * given.gpus_per_node}")
    if given.output is not None and Path(given.output).suffix != ".json":
        yield Problem(f"--output {given.output}", "is not a file name ending in .json", "--output plan.json")


def describes_model(cfg: SwiftConfig) -> bool:
    """Return whether this machine has a description of the run's model."""
    name = str(cfg.model.model)
    return Path(name).expanduser().exists() or published_model(name) is not None


def planned_config(what: str, task: str | None, rest: Sequence[str]) -> SwiftConfig:
    """Return the configuration of a run that is planned, by its YAML file or by a model and a task.

    Args:
        what: The file, or what `--model` would name.
        task: None: the file's own, sft for a model.
        rest: Further options of the run.
    """
    named = Path(what).suffix in (".yaml", ".yml")
    words = [what, *rest] if named else ["--model", what, *rest]
    return load_config(task or (None if named else "sft"), words, environ={})


def described_model(cfg: SwiftConfig) -> ModelSpec:
    """Return the spec of the run's model: of a folder, a config.json, or a published model by its name.

    Raises:
        ConfigError: There is none.
    """
    name = str(cfg.model.model)
    path = Path(name).expanduser()
    if path.is_dir():
        return model_spec_for_task(cfg, locate_model(cfg.model, weights=False))
    known = published_model(name)
    if not path.is_file() and known is None:
        rule = "is not a folder, a config.json or a published model of the table"
        near = difflib.get_close_matches(name.rpartition("/")[2].lower(), MODELS, 3, 0.5)
        fix = f"{', '.join(near)}, or the path of a config.json" if near else "the path of its config.json"
        raise ConfigError(Problem(f"--model {name}", rule, fix))
    text = path.read_text(encoding="utf-8") if path.is_file() else json.dumps(known[1] if known else {})
    with tempfile.TemporaryDirectory(prefix="megaswift-") as folder:
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        return model_spec_for_task(cfg, Path(folder))
