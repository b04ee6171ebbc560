"""Numbers of a generation against those that TRL's trainer logs of the same rewards and completions."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.data.prompts.source import Prompt
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.metrics import group_rewards_differ, rollout_statistics, staleness_metrics
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion
from megaswift.trainers.rl.scorer import ScoredCompletion
from tests.losses import trainers

STOP, GROUP = 0, 2
REWARDS = {"first": [1.0, 0.5, 0.0, 0.0], "second": [2.0, -1.0, 4.0, 4.0]}
WEIGHTS = {"first": 1.0, "second": 0.25}
WRITTEN = [[5, 6, STOP], [7], [8, 9, 5, 6], [4, STOP]]


def rollout(tokens: list[int], finished: bool, rewards: dict[str, float]) -> ScoredCompletion:
    prompt = Prompt(0, (3, 4), "Question", {})
    total = sum(WEIGHTS[name] * value for name, value in rewards.items())
    return ScoredCompletion(prompt, Completion(tuple(tokens), (-1.0,) * len(tokens), finished), "text", rewards, total)


def rollouts() -> list[ScoredCompletion]:
    return [rollout(ids, ids[-1] == STOP, {n: v[i] for n, v in REWARDS.items()}) for i, ids in enumerate(WRITTEN)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """TRL's, of one generation."""
    trl: Any = trainers.grpo(tmp_path_factory.mktemp("grpo"))
    trl.rollout_func = lambda prompts, trainer: {
        "prompt_ids": [[3, 4]] * 4,
        "completion_ids": WRITTEN,
        "logprobs": None,
    }
    names = [*REWARDS]
    trl.reward_func_names, trl.reward_weights, trl.eos_token_ids = (
        names,
        torch.tensor([WEIGHTS[n] for n in names]),
        [STOP],
    )
    trl._calculate_rewards = lambda *_: torch.tensor([REWARDS[n] for n in names]).T
    trl.num_generations = GROUP
    trl._metrics["train"] = defaultdict(list)
    trl.model.train()
    trl._generate_and_score_completions([{"prompt": "Question"}] * 4)
    return {name: values[-1] for name, values in trl._metrics["train"].items()}


def test_they_are_trl_s(logged: dict[str, float]) -> None:
    found = rollout_statistics(rollouts(), GROUP)
    assert found == {name: pytest.approx(logged[name], rel=1e-6) for name in found}
    assert set(logged) - set(found) <= {"num_tokens"}
    assert (
        found["frac_reward_zero_std"] == 0.5 and found["completions/clipped_ratio"] == 0.5 and found["reward_std"] > 0.1
    )


def test_of_one_completion_alone() -> None:
    found = rollout_statistics(rollouts()[1:2], 1)
    assert found["reward_std"] == found["rewards/first/std"] == 0 and found["completions/mean_terminated_length"] == 0
    assert found["completions/clipped_ratio"] == 1 and found["completions/max_length"] == 1


def test_spread() -> None:
    assert [group_rewards_differ(rollouts()[i : i + 2]) for i in (0, 2)] == [True, False]


def test_a_spread_of_single_rewards_counts_where_they_are_normalized_one_by_one() -> None:
    rewards = [{"first": 1.0, "second": 0.0}, {"first": 0.0, "second": 1.0}]
    group = [replace(rollouts()[0], rewards=r, total=1.0) for r in rewards]
    assert (
        group_rewards_differ(group, each=True)
        and not group_rewards_differ(group)
        and not group_rewards_differ(group[:1] * 2, each=True)
    )


def test_rounding_and_missing_rewards_are_no_spread() -> None:
    def group(*totals: float) -> list[ScoredCompletion]:
        return [replace(rollouts()[0], total=t) for t in totals]

    assert (
        not group_rewards_differ(group(0.1 + 0.2, 0.3))
        and not group_rewards_differ(group(math.nan, 1.0))
        and not group_rewards_differ(group(math.nan))
    )
    assert group_rewards_differ(group(math.nan, 1.0, 2.0)) and group_rewards_differ(group(0.3, 0.3001))


def test_rewards_that_were_not_given_move_no_mean() -> None:
    made = rollouts()
    made[0] = replace(made[0], rewards={**made[0].rewards, "first": math.nan})
    made = [replace(r, rewards={**r.rewards, "third": math.nan}) for r in made]
    found = rollout_statistics([*made[:3], replace(made[3], total=math.nan)], GROUP)
    assert found["rewards/first/mean"] == pytest.approx(0.5 / 3) and "rewards/third/mean" not in found
    assert (
        found["reward"] == pytest.approx(np.mean([r.total for r in made[:3]])) and np.isfinite([*found.values()]).all()
    )


def test_segments_of_agents() -> None:
    sessions = [
        MultiTurnCompletion(
            *((5, 6, 7), (-1.0,) * 2, True, (True, False, True)),
            turns=3,
            rewritten=1,
            segments=("first", "edited"),
            further=((1, (2, 3)),),
        ),
        MultiTurnCompletion((5, 6), (-1.0,) * 2, True, (True, True), turns=2, segments=("first",)),
    ]
    found = rollout_statistics([replace(rollouts()[0], completion=session) for session in sessions], 2)
    assert found["agent/segments"] == 1.5 and found["completions/mean_length"] == 2
    assert found["completions/rewritten_turns"] == 0.5, "a segment's last turn has no answer"
    counts = {name: value for name, value in found.items() if name.startswith("agent/segments_")}
    assert counts == {f"agent/segments_{r}": float(r == "edited") for r in ("edited", "rewound", "tools", "template")}
    assert not any(name.startswith("agent/") for name in rollout_statistics(rollouts(), 2))


def test_staleness_is_a_mean_over_tokens() -> None:
    """By hand: one token is three steps old, seven are one step old."""
    versions = (((3, 1), (5, 3)), ((5, 4),))
    completions = [
        Completion((7,) * sum(count for _, count in runs), (-1.0,) * 4, True, versions=runs) for runs in versions
    ]
    assert staleness_metrics(completions, 6) == {
        "sampling/staleness": 1.25,
        "sampling/staleness_max": 3.0,
        "sampling/mixed_versions": 0.5,
    }
    assert staleness_metrics([Completion((), (), False)], 6)["sampling/staleness"] == 0
