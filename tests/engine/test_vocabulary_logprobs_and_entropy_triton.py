"""The Triton kernels in Triton's interpreter, on a CPU, against plain torch on the same logits.

A variable that is read when the kernels are defined chooses the interpreter, so they run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.pool import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the CPU build of torch comes without triton"
    ),
]


def lines(*words: str, **variables: str) -> list[list[str]]:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.engine.run_triton_kernels", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_kernels_give_what_torch_gives() -> None:
    """Every field, gradient, dtype, soft cap, padding, labels of other shards, several blocks a row."""
    cases = lines(TRITON_INTERPRET="1")
    assert len(cases) == 36
    assert all(float(value) < float(limit) for _, value, limit in cases), cases


def test_kernels_compile(tmp_path: Path) -> None:
    """For compute capability 9.0, by Triton's compiler, which needs no GPU: the interpreter takes more than it does."""
    cases = lines("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(cases) == 12 and all(int(size) > 1000 for _, _, size in cases), cases
