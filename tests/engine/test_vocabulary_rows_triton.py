"""The Triton kernels in Triton's interpreter, on a CPU, against plain torch on the same logits.

A variable that is read when the kernels are defined chooses the interpreter, so they run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.parity.pool import ROOT


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the CPU build of torch comes without triton")
def test_kernels_give_what_torch_gives() -> None:
    """Every field, gradient, dtype, soft cap, padding, labels of other shards, several blocks a row."""
    command = [sys.executable, "-m", "tests.engine.run_triton_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [line.split() for line in done.stdout.splitlines()]
    assert len(cases) == 36
    assert all(float(value) < float(limit) for _, value, limit in cases), done.stdout
