"""Programs that run Triton kernels in Triton's interpreter, on a CPU, or compile them.

A variable that is read when the kernels are defined chooses the interpreter, so they run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.parity.pool import ROOT

NEED_TRITON = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the CPU build of torch comes without triton"
    ),
]


def printed(module: str, *words: str, **variables: str) -> list[list[str]]:
    """The words of each line that it prints."""
    command = [sys.executable, "-m", module, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]
