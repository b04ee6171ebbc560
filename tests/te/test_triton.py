"""The permutation's stand-ins against Transformer Engine's own Triton kernels, run by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.parity.pool import ROOT
from tests.te.sources import RELEASES


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the CPU build of torch comes without triton")
@pytest.mark.parametrize("release", RELEASES)
def test_stand_ins_are_the_kernels(release: str) -> None:
    """Ten functions, with and without padding of experts' rows."""
    command = [sys.executable, "-m", "tests.te.triton_reference", release]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 10 and all(float(value) < 1e-6 for value, _ in lines), done.stdout
