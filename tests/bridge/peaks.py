"""Memory that a program of its own takes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.sources import ROOT

PEAK = """
import sys
from pathlib import Path
def peak():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
"""


def printed(program: str, *words: object) -> str:
    """What the program prints, given these arguments. Its `peak()` is the bytes resident at most so far; mapped files
    count."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PEAK + program, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
