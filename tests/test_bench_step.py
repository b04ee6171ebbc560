"""scripts/bench_step.py runs, and its three contenders do the same work. No timing is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_step.py"


@pytest.mark.process
@pytest.mark.slow
def test_contenders_see_the_same_batches() -> None:
    """The first loss of megaswift, the plain loop and TRL is one number; the second shows that the optimizers agree."""
    small = ["--size", "tiny", "--rows", "2", "--length", "64", "--steps", "1", "--warmup", "1", "--threads", "1"]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *small, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout[done.stdout.index("\n{\n") if not done.stdout.startswith("{\n") else 0:])
    first = {name: losses[0] for name, losses in result["first_losses"].items()}
    assert first.keys() == {"megaswift", "plain", "trl"}
    assert first["megaswift"] == pytest.approx(first["plain"], rel=1e-5)
    assert first["trl"] == pytest.approx(first["plain"], rel=1e-3)  # TRL prints four digits
    assert result["first_losses"]["megaswift"][1] == pytest.approx(result["first_losses"]["plain"][1], rel=1e-5)
    assert all(seconds > 0 for seconds in result["median_s"].values())
