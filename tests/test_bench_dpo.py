"""scripts/bench_dpo.py runs, and both contenders do the same work. No timing is asserted."""

from __future__ import annotations

import pytest

from tests.run_bench_script import run_bench_script


@pytest.mark.process
@pytest.mark.slow
def test_contenders_train_on_the_same_pairs() -> None:
    """The loss of each step is one number; it starts at log 2 and then shows reference, pairs and optimizers to
    agree."""
    result = run_bench_script("bench_dpo.py", "--pairs 2 --length 96 --steps 2 --warmup 2 --json")
    ours, theirs = result["losses"]["megaswift"], result["losses"]["trl"]
    assert len(ours) == len(theirs) == 4
    assert ours == pytest.approx(theirs, rel=1e-5) and abs(ours[-1] - ours[0]) > 1e-4
    assert result["lengths"]["median"] <= 24 and all(seconds > 0 for seconds in result["median_s"].values())
