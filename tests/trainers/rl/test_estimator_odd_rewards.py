"""Estimators on rewards of odd kinds: as numbers and as lists, of an environment beside functions, not given at all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.losses.advantages import multi_reward_group_advantages
from tests.trainers.rl.makers import completed, rollout
from tests.trainers.rl.test_advantages import GROUP, TOTALS, TWO, assert_same, estimator, values


@pytest.mark.parametrize("group", [1, GROUP])
@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"beta": 0.1, "gamma": 0.9}])
def test_reinforce_plus_plus_has_one_answer_for_a_number_and_for_a_list(options: dict[str, Any], group: int) -> None:
    """The same reward as a number, or as a list with it at the last token; and the paper's formula, written out."""
    made = estimator(advantage_estimator="reinforce_plus_plus", num_generations=group, **options)
    known = values()
    lengths = [len(o) for o in known["old"]]
    numbers = [rollout(t, n) for t, n in zip(TOTALS, lengths, strict=True)]
    lists = [replace(r, tokens=(0.0,) * (n - 1) + (r.total,)) for r, n in zip(numbers, lengths, strict=True)]
    found, same = (made(some, completed(known))["advantages"] for some in (numbers, lists))
    assert np.concatenate(found) == pytest.approx(np.concatenate(same), rel=1e-6, abs=1e-7)
    beta, gamma = options.get("beta", 0.0), options.get("gamma", 1.0)
    wanted = []
    for i, (old, reference) in enumerate(zip(known["old"], known["reference"], strict=True)):
        first = i // group * group
        score = TOTALS[i] - (np.mean(TOTALS[first : first + group]) if group > 1 else 0.0)
        rewards = -beta * (old - reference).double().numpy()
        rewards[-1] += score
        n = len(rewards)
        wanted += [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
    normalized = (np.asarray(wanted) - np.mean(wanted)) / np.std(wanted, ddof=1)
    assert np.concatenate(found) == pytest.approx(normalized, rel=1e-4, abs=1e-5)


def test_an_environment_s_reward_is_one_more_of_those_normalized_first() -> None:
    """Fewer weights than rewards: the environment's own has weight 1."""
    judged = [rollout(0.5 * t + e, a=t, environment=e) for t, e in zip(TOTALS, TWO["b"], strict=True)]
    made = estimator(multi_objective_aggregation="normalize_then_sum", reward_weights=(0.5,), environment="e.py:World")
    found = made(judged, completed(values()))["advantages"]
    assert_same(
        found,
        multi_reward_group_advantages(
            torch.tensor([TOTALS, TWO["b"]]).T, torch.tensor([0.5, 1.0]), GROUP, "normalize_then_sum"
        ),
    )


@pytest.mark.parametrize("estimate", ["grpo", "rloo", "reinforce_plus_plus"])
def test_a_completion_without_a_reward_has_no_advantage(estimate: str) -> None:
    """It moves no mean either: the others are as they are where it is not there."""
    judged = [rollout(t) for t in (math.nan, 0.0, 0.5, 2.0, 1.0, 0.25, -1.0, math.nan)]
    made = estimator(advantage_estimator=estimate)
    found = made(judged, completed(values()))["advantages"]
    assert not found[0].any() and not found[7].any() and all(np.isfinite(f).all() for f in found)
    if estimate == "grpo":
        scores = np.asarray([0.0, 0.5, 2.0])
        wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
        assert [float(f[0]) for f in found[1:4]] == pytest.approx(wanted, rel=1e-5)
