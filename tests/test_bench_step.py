"""scripts/bench_step.py runs, and its three contenders do the same work. No timing is asserted."""

from __future__ import annotations

import pytest

from tests.run_bench_script import run_bench_script


@pytest.mark.process
@pytest.mark.slow
def test_contenders_see_the_same_batches() -> None:
    """The first loss of megaswift, the plain loop and TRL is one number; the second shows that the optimizers agree."""
    result = run_bench_script("bench_step.py", "--rows 2 --length 64 --steps 1 --warmup 1 --json")
    first = {name: losses[0] for name, losses in result["first_losses"].items()}
    assert first.keys() == {"megaswift", "plain", "trl"}
    assert first["megaswift"] == pytest.approx(first["plain"], rel=1e-5)
    assert first["trl"] == pytest.approx(first["plain"], rel=1e-3)  # TRL prints four digits
    assert result["first_losses"]["megaswift"][1] == pytest.approx(result["first_losses"]["plain"][1], rel=1e-5)
    assert all(seconds > 0 for seconds in result["median_s"].values())
