"""scripts/bench_grpo.py runs, and both contenders do the same work. No timing is asserted."""

from __future__ import annotations

import pytest

from tests.run_bench_script import run_bench_script


@pytest.mark.process
@pytest.mark.slow
def test_both_sample_completions_of_the_full_length() -> None:
    """None ends early, and every part of a step that a contender has is counted."""
    result = run_bench_script(
        "bench_grpo.py", "--prompts 2 --generations 4 --prompt_length 6 --length 9 --steps 2 --warmup 1 --json"
    )
    assert result["mean_lengths"] == {"megaswift": [9.0, 9.0], "trl": [9.0, 9.0]}
    assert all(seconds > 0 for seconds in result["median_s"].values())
    for name, split in result["split_s"].items():
        assert {part for part, seconds in split.items() if seconds} >= {"generation", "rewards", "training"}, name
    assert result["split_s"]["megaswift"]["weight sync"] > 0
    assert result["ratio"] > 0
