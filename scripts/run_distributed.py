"""Starts a run on N processes of M machines, for those whose job scripts call such a script: the commands of megaswift
do the same.

    python scripts/run_distributed.py --nproc_per_node 8 --config run.yaml --algorithm sft --learning_rate 2e-5

is `megaswift sft run.yaml --nproc_per_node 8 --learning_rate 2e-5`: it checks the run, then starts the processes.
Without `--algorithm` the file names the task. With `--use_torchrun` torchrun is started at once, also for one process,
and the processes check. Options after these go over the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.commands import training  # noqa: E402
from megaswift.config import load_config  # noqa: E402
from megaswift.error_exit import end_process, print_error_once  # noqa: E402
from megaswift.errors import ConfigError, Problem, UserError, did_you_mean_hint  # noqa: E402
from megaswift.launchers import torchrun_launcher  # noqa: E402
from megaswift.launchers.launcher import TrainingCommand  # noqa: E402
from megaswift.launchers.options.variables import is_launched_worker  # noqa: E402
from megaswift.options.tasks import TASKS  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The options of this script; others are the run's."""
    made = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All options of a run: megaswift sft --help all",
    )
    made.add_argument(
        "--nproc_per_node", "--nproc-per-node", metavar="N", help="processes on this machine (NPROC_PER_NODE)"
    )
    made.add_argument(
        "--nnodes", metavar="N", help="machines (NNODES); then --node_rank, --master_addr and --master_port as well"
    )
    made.add_argument("--config", metavar="FILE", help="YAML or JSON, as for megaswift sft FILE")
    made.add_argument("--algorithm", metavar="TASK", help=f"{', '.join(TASKS)}; default: the file's, else sft")
    made.add_argument(
        "--use_torchrun",
        "--use-torchrun",
        action="store_true",
        help="through torchrun at once; its processes check the run",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs to the end; the exit code is that of `megaswift sft`, of torchrun with --use_torchrun, 2 for a mistake."""
    mine, rest = parser().parse_known_args(argv)
    counts = [
        word
        for name in ("nproc_per_node", "nnodes")
        if (n := getattr(mine, name)) is not None
        for word in (f"--{name}", n)
    ]
    words = [*([mine.config] if mine.config else []), *counts, *rest]
    problems = []
    if mine.algorithm not in (None, *TASKS):
        rule = f"is not a supported task; tasks are {', '.join(TASKS)}"
        fix = did_you_mean_hint(mine.algorithm, list(TASKS)) or "--algorithm sft"
        problems.append(Problem(f"--algorithm {mine.algorithm}", rule, fix))
    if not mine.config:
        problems.append(Problem("--config", "is missing", "--config run.yaml"))
    try:
        if problems:
            raise ConfigError(problems)
        if not mine.use_torchrun or is_launched_worker(os.environ):  # a worker's torchrun is there already
            return training.main(mine.algorithm or load_config(None, words).task, words)
        cfg = load_config(mine.algorithm, words, complete=True)
        if cfg.launch.launcher != "torchrun":
            raise ConfigError(
                Problem("--use_torchrun", f"the launcher is {cfg.launch.launcher}", "keep one of the two")
            )
        return torchrun_launcher.start_torchrun(TrainingCommand(cfg.task, words, cfg.given), cfg.launch, os.environ)
    except UserError as error:
        return print_error_once(error, os.environ)


if __name__ == "__main__":
    end_process(main())
