"""Runs in which one rank stops inside a step: they end soon after --ddp_timeout, with its name, whatever the engine.

Covers: trainers/collective_timeout_monitor, trainers/rank_states.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

TIMEOUT = 10
HANG = """\
import os, sys, time
from importlib.abc import MetaPathFinder

class Late(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "megaswift.trainers.loop":
            sys.meta_path.remove(self)
            from torch import autograd
            run, calls = autograd.graph._engine_run_backward, []
            def stops_here(*values, **options):
                calls.append(1)
                if len(calls) == 3:
                    open(os.environ["HUNG_RANK"], "w").close()
                    time.sleep(600)
                return run(*values, **options)
            autograd.graph._engine_run_backward = stops_here
            autograd._engine_run_backward = stops_here

if os.environ.get("RANK") == os.environ["HUNG_RANK"]:
    sys.meta_path.insert(0, Late())
"""
"""Of a module that Python imports at its start: the third backward pass of one rank does not begin."""


def run_with_hung_rank(folder: Path, rank: int, options: str) -> tuple[int, str, float]:
    """Exit code, standard error, and seconds from the hang to the end."""
    (folder / "sitecustomize.py").write_text(HANG)
    words = [*write_inputs(folder), "--train_type", "full", "--output_dir", str(folder / "out"), "--logging_steps", "1"]
    words += ["--max_steps", "6", "--global_batch_size", "8", "--ddp_timeout", str(TIMEOUT)]
    own = {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "HUNG_RANK": str(rank)}
    process = subprocess.Popen(
        [sys.executable, "-m", "megaswift", "sft", *words, *options.split()],
        env=os.environ | own,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, error = process.communicate(timeout=240)
    return process.returncode, error, time.time() - (folder / str(rank)).stat().st_mtime


@pytest.mark.process
@pytest.mark.parametrize(
    ("rank", "options", "operation"),
    [
        (1, "--pp 2 --nproc_per_node 2", "PIPELINE_MODEL_PARALLEL_GROUP (ranks 0, 1)"),
        (0, "--tp 2 --nproc_per_node 2", "TENSOR_MODEL_PARALLEL_GROUP (ranks 0, 1)"),
        (1, "--engine ddp --nproc_per_node 2", "all_reduce"),
        (1, "--engine fsdp2 --nproc_per_node 2", "reduce_scatter"),
        (1, "--engine zero2 --nproc_per_node 2", "all"),
        (3, "--tp 2 --pp 2 --nproc_per_node 4", ""),
    ],
)
def test_it_is_named(rank: int, options: str, operation: str, tmp_path: Path) -> None:
    code, error, end = run_with_hung_rank(tmp_path, rank, options)
    stacks = tmp_path / "out/stacks"
    print(error)
    print("SECONDS", end)
    print((stacks / f"rank-{rank}.txt").read_text()[-800:])
    assert code == 1
    assert f"- rank {rank}: did not join" in error and operation in error and "stops_here" in error
