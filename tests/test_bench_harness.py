"""Peaks of memory: each contender of a benchmark has a process to itself, with the options that were given."""

from __future__ import annotations

import pytest

from tests.run_bench_script import run_bench_script


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options",
    [
        ("bench_step.py", "--rows 2 --length 64 --fused_adam --only plain"),
        ("bench_dpo.py", "--pairs 2 --length 96 --unpacked"),
        ("bench_grpo.py", "--prompts 1 --generations 2 --prompt_length 6 --length 9"),
    ],
)
def test_peaks(script: str, options: str) -> None:
    found = run_bench_script(script, f"{options} --steps 1 --warmup 1 --memory")["peak_gib"]
    assert set(found) == ({"plain"} if "--only" in options else {"megaswift", "trl"})
    assert all(0.1 < peak < 10 for peak in found.values())
