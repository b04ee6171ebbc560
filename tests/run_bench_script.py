"""Runs a benchmark of scripts/ whose contenders take turns, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.sources import ROOT


def run_bench_script(script: str, options: str) -> dict[str, Any]:
    """What the script prints as JSON; libraries may print before it."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "scripts" / script),
        "--size",
        "tiny",
        "--threads",
        "1",
        *options.split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout[("\n" + done.stdout).index("\n{\n") :])
    return found
