"""Rules for `--profile`: what goes together, and with how many processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaswift.trainers.options.profiling import ProfileConfig
from megaswift.trainers.options.profiling_checks import PROFILE_CLASHES, profile_rank_problems
from tests.config.refusals import assert_contradiction, assert_idle, problems

IDLE = [
    ("--profile_step_start 3", "--profile_step_start 3 --profile"),
    ("--profile_step_end 7", "--profile_step_end 7 --profile"),
    ("--profile_ranks 0 1", "--profile_ranks 0 1 --profile"),
]
CLASHING = [
    ("profile_step_end", "--profile --profile_step_start 4 --profile_step_end 4"),
    ("profile_step_start", "--profile --profile_step_start 5 --profile_step_end 7 --max_steps 5"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


def test_every_row_is_tried() -> None:
    assert [name for name, _ in CLASHING] == [r.options[0] for r in PROFILE_CLASHES]


def test_a_default_is_named() -> None:
    (only,) = problems("--profile --max_steps 2")
    assert only == (
        "--max_steps 2: profile_step_start defaults to 2: profiling would start after the last step, so no step would "
        "be profiled"
    )


def test_ranks_that_the_run_does_not_have() -> None:
    options = ProfileConfig(profile=True, profile_ranks=(0, 4, 7))
    (problem,) = profile_rank_problems(options, 4)
    assert (problem.what, problem.rule) == ("--profile_ranks 4, 7", "this run has ranks 0 to 3")
    assert not profile_rank_problems(replace(options, profile_ranks=(3,)), 4)
    assert not profile_rank_problems(replace(options, profile=False), 4)
