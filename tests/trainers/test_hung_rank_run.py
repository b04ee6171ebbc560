"""Runs in which one rank stops inside a step end soon after --ddp_timeout, with its name, whatever the engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.trainers.planted import BACKWARD, run_with_fault

HANG = (
    BACKWARD
    + """
import pathlib, time

def fault(number):
    if number == 3:
        pathlib.Path("hung").touch()
        time.sleep(600)
"""
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("rank", "options", "operation"),
    [
        pytest.param(1, "--pp 2 --nproc_per_node 2", "of PIPELINE_MODEL_PARALLEL_GROUP (ranks 0, 1)", id="pp2"),
        *(
            pytest.param(rank, options, operation, id=name, marks=pytest.mark.slow)
            for name, rank, options, operation in (
                ("tp2", 0, "--tp 2 --nproc_per_node 2", "of TENSOR_MODEL_PARALLEL_GROUP (ranks 0, 1)"),
                ("tp2 pp2", 3, "--tp 2 --pp 2 --nproc_per_node 4", "of TENSOR_MODEL_PARALLEL_GROUP (ranks 2, 3)"),
                ("ddp", 1, "--engine ddp --nproc_per_node 2", "all_reduce of all ranks"),
                ("fsdp2", 1, "--engine fsdp2 --nproc_per_node 2", "of all ranks"),
                ("zero2", 1, "--engine zero2 --nproc_per_node 2", "all_reduce of a group (ranks 0, 1)"),
            )
        ),
    ],
)
def test_it_is_named(rank: int, options: str, operation: str, tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, rank, HANG, f"{options} --ddp_timeout 8")
    assert done.returncode == 1, done.stderr
    assert f"- rank {rank}: did not join " in done.stderr and operation in done.stderr, done.stderr
    assert f"within 8 s (--ddp_timeout) in step {2 if 'engine' not in options else 3}" in done.stderr
    assert f"rank {rank} runs planted_fault.py:" in done.stderr
    assert "in fault" in (tmp_path / f"out/stacks/rank-{rank}.txt").read_text()
    assert time.time() - (tmp_path / "hung").stat().st_mtime < 8 + 30, "ended by --ddp_timeout, not by a launcher"
