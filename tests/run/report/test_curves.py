"""Which curves a page has, and their numbers."""

from __future__ import annotations

import math

import pytest

from megaswift.run.report.curves import MOST_POINTS, chart_titles, run_curves
from tests.run.report.runs import line

RL = {"reward": 0.5, "reward_std": 0.1, "kl": 0.0, "rewards/a/mean": 0.25, "rewards/a/std": 0.1, "entropy": 1.0}


def test_reward_kl_and_each_reward_come_first() -> None:
    lines = [line(i, **RL, **{"rewards/b/mean": 0.75}) for i in range(1, 4)]
    usual, _ = chart_titles([lines])
    assert [*usual][:4] == ["reward", "kl", "rewards/a/mean", "rewards/b/mean"] and "loss" not in usual
    assert usual["rewards/b/mean"] == "reward b, mean"


def test_a_single_reward_is_the_reward() -> None:
    usual, further = chart_titles([[line(i, **RL) for i in range(1, 4)]])
    assert "rewards/a/mean" not in usual and "reward" in usual and "rewards/a/mean" not in further


def test_no_curve_twice() -> None:
    """Speed once; of metrics with the same numbers one; nothing that never changes among the further ones."""
    lines = [line(i, step_time=1 / i, aux=i, aux_again=i, always=3) for i in range(1, 9)]
    usual, further = chart_titles([lines])
    assert "tokens_per_second" in usual and not {"step_time", "tokens_per_second_per_device"} & {*usual, *further}
    assert [*further] == ["aux"]


def test_several_runs_have_the_curves_of_each() -> None:
    usual, _ = chart_titles([[line(1)], [line(1, **RL)], []])
    assert [*usual][:3] == ["loss", "reward", "kl"]


def test_positions_by_step_tokens_and_time() -> None:
    """Logged every third step: the time of a line is that of all steps since the one before it."""
    lines = [line(step, tokens=30, step_time=2.0) for step in (3, 6, 8)]
    curves = run_curves(lines, [{"step": 7, "loss": 1.5}], ["loss"])
    assert curves["x"] == {"step": [3, 6, 8], "tokens": [30, 60, 90], "time": [6, 12, 16]}
    assert curves["evals"] == {"x": {"step": [7], "tokens": [60], "time": [12]}, "curves": {"loss": [1.5]}}


def test_a_long_run_is_cut_without_losing_its_spike() -> None:
    count = 100 * MOST_POINTS + 7
    lines = [line(i, loss=9.0 if i == 54_321 else 1.0) for i in range(1, count + 1)]
    curve = run_curves(lines, [], ["loss"])
    loss = curve["curves"]["loss"]
    assert curve["lines_per_point"] == 101
    assert len(loss["mean"]) == len(loss["low"]) == len(curve["x"]["step"]) <= MOST_POINTS
    assert max(loss["high"]) == 9.0 and max(loss["mean"]) == pytest.approx(1 + 8 / 101, abs=1e-4)
    assert curve["x"]["step"][-1] == count and curve["x"]["tokens"][-1] == 100 * count


def test_what_is_not_finite_is_a_gap() -> None:
    curves = run_curves([line(1, loss=None), line(2, loss=math.inf), line(3)], [], ["loss", "absent"])["curves"]
    assert curves == {"loss": {"mean": [None, None, 1.33333]}}
