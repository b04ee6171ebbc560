"""Runs of `megaswift sft` with a fault planted in one rank, by a module that Python imports at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

STARTER = """\
import os, sys, time
from importlib.abc import MetaPathFinder
from pathlib import Path

FOLDER = Path(__file__).parent
RANK, WORLD = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", "1"))

def start_together():
    from torch import distributed
    init = distributed.init_process_group

    def together(*values, **options):
        (FOLDER / f"started-{RANK}").touch()
        while len(list(FOLDER.glob("started-*"))) < WORLD:
            time.sleep(0.01)
        return init(*values, **options)

    distributed.init_process_group = together

class WhenTrainingIsImported(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "megaswift.run.course":
            sys.meta_path.remove(self)
            if RANK is not None:
                start_together()
            if (RANK or "0") == os.environ["FAULTY_RANK"]:
                import planted_fault

sys.meta_path.insert(0, WhenTrainingIsImported())
"""
"""Plants the fault in one rank. All ranks start the process group together, however long a busy machine takes to import
what they need: a test may then have a short --ddp_timeout."""
BACKWARD = """\
from torch import autograd
run, calls = autograd.graph._engine_run_backward, []

def planted(*values, **options):
    calls.append(1)
    fault(len(calls))
    return run(*values, **options)

autograd.graph._engine_run_backward = autograd._engine_run_backward = planted
"""
"""Calls `fault(n)` before the n-th backward pass, whatever the engine."""


def _words(folder: Path) -> list[str]:
    return [*write_inputs(folder), "--train_type", "full", "--logging_steps", "1", "--global_batch_size", "8"]


def run_without_fault(folder: Path, *options: str, ranks: int = 1) -> str:
    """The run of `run_with_fault` in forked ranks, which have paid for their imports; what they printed."""
    return run(_words(folder), folder / "out", "--max_steps", 6, *options, ranks=ranks)


def run_with_fault(
    folder: Path, rank: int, fault: str, options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Six steps of eight rows each on a tiny model, its output in `folder`/out; `fault` is a module's code."""
    (folder / "sitecustomize.py").write_text(STARTER)
    (folder / "planted_fault.py").write_text(fault)
    words = [*_words(folder), "--output_dir", str(folder / "out")]
    words += [
        *([] if "max_steps" in options else ["--max_steps", "6"]),
        *(word.replace("\0", " ") for word in options.split()),
    ]
    own = {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "FAULTY_RANK": str(rank), **environ}
    command = [sys.executable, "-m", "megaswift", "sft", *words]
    return subprocess.run(command, env=os.environ | own, cwd=folder, capture_output=True, text=True, timeout=600)
