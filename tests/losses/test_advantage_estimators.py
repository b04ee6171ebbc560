"""OPO, ReMax and pass@k advantages against their papers' definitions, written out in plain Python. The other
estimators are held against TRL in tests/trainers/rl/test_advantages.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.losses.advantage_estimators import ESTIMATORS, EstimatorInput, estimate_advantage_fields
from megaswift.losses.options.estimator_table import advantage_estimator_names

LENGTHS = [2, 5, 3, 1, 4, 4, 0, 2]


def inputs(totals: list[float], group: int, lengths: list[int] | None = None, **options: Any) -> EstimatorInput:
    lengths = lengths or [3] * len(totals)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    nothing = torch.zeros(mask.shape)
    return EstimatorInput(
        torch.tensor(totals),
        torch.zeros(len(totals), 0),
        torch.zeros(0),
        nothing,
        nothing,
        mask,
        torch.tensor(lengths),
        None,
        None,
        group,
        False,
        SwiftConfig(task="grpo", **options).rl,
    )


def test_each_estimator_of_the_table_is_registered() -> None:
    assert {*advantage_estimator_names()} == {*ESTIMATORS.names()}


def test_opo_s_baseline_is_the_mean_reward_weighted_by_length() -> None:
    """By hand: (2 x 1 + 5 x 0 + 3 x 4 + 1 x 2) / 11 = 16 / 11, (4 x -1 + 4 x 3 + 0 x 9 + 2 x 0) / 10 = 0.8."""
    totals = [1.0, 0.0, 4.0, 2.0, -1.0, 3.0, 9.0, 0.0]
    found = estimate_advantage_fields("opo", inputs(totals, 4, LENGTHS))["advantages"]
    wanted = [r - b for r, b in zip(totals, [16 / 11] * 4 + [0.8] * 4, strict=True)]
    assert found.shape == (8, 5) and found[:, 0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_opo_minimizes_the_variance_of_the_gradient_where_its_norm_is_the_length() -> None:
    """The paper's premise: a completion's squared gradient norm is its length; b minimizes sum of l (r - b)^2."""
    totals, lengths = [1.0, 0.0, 4.0, 2.0], LENGTHS[:4]
    baseline = totals[0] - float(estimate_advantage_fields("opo", inputs(totals, 4, lengths))["advantages"][0, 0])

    def variance(b: float) -> float:
        return sum(length * (r - b) ** 2 for r, length in zip(totals, lengths, strict=True))

    assert all(variance(baseline) < variance(baseline + d) for d in (-0.01, 0.01, 0.5, -0.5))


def test_a_reward_that_was_not_given_moves_no_baseline() -> None:
    found = estimate_advantage_fields("opo", inputs([1.0, math.nan, 4.0, 2.0], 4, LENGTHS[:4]))["advantages"][:, 0]
    assert found.tolist() == pytest.approx([1 - 16 / 6, 0.0, 4 - 16 / 6, 2 - 16 / 6], rel=1e-6)


def passes(totals: list[float], group: int, k: int) -> EstimatorInput:
    return inputs(totals, group, advantage_estimator="pass_at_k", num_generations=group, pass_at_k=k)


def every_set(rewards: list[float], k: int) -> list[float]:
    """The definition: each set of k is worth its best reward; a completion's advantage is the mean, over the sets that
    hold it, of their worth, less the mean of all sets, over their standard deviation."""
    sets = list(itertools.combinations(range(len(rewards)), k))
    worth = [max(rewards[i] for i in s) for s in sets]
    mean, std = statistics.fmean(worth), statistics.pstdev(worth)
    if std == 0:
        return [0.0] * len(rewards)
    return [
        statistics.fmean((w - mean) / std for s, w in zip(sets, worth, strict=True) if i in s)
        for i in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("passing", range(7))
def test_pass_at_k_is_the_mean_over_all_sets(k: int, passing: int) -> None:
    rewards = [1.0] * passing + [0.0] * (6 - passing)
    found = estimate_advantage_fields("pass_at_k", passes(rewards + [0.0] * 6, 6, k))["advantages"]
    assert found[:6, 0].tolist() == pytest.approx(every_set(rewards, k), rel=1e-5, abs=1e-6)
    assert not found[6:].any()


def test_pass_at_k_leaves_out_what_has_no_reward() -> None:
    found = estimate_advantage_fields("pass_at_k", passes([1.0, math.nan, -1.0, -0.5], 4, 2))
    wanted = every_set([1.0, 0.0, 0.0], 2)
    assert found["advantages"][:, 0].tolist() == pytest.approx([wanted[0], 0.0, *wanted[1:]], rel=1e-5)


def test_remax_subtracts_the_reward_of_the_greedy_completion() -> None:
    """By hand: returns of the tokens, a KL penalty of 0.25 at the second token and a reward of 2 at the last, less the
    baseline. Without a reward of its own or of the greedy completion there is nothing to compare."""
    x = inputs([2.0, 2.0, math.nan, 1.0], 2, [3, 1, 2, 2])
    rewards = torch.tensor([[0.0, -0.25, 2.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    x = dataclasses.replace(x, token_rewards=rewards, baselines=torch.tensor([0.5, 0.5, 1.0, math.nan]))
    expected = [[1.25, 1.25, 1.5], [1.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert estimate_advantage_fields("remax", x)["advantages"].tolist() == expected
