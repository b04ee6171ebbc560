"""From rewards to what losses read, against TRL's trainers; whitening, a controller and the critic's targets by
hand.

Covers: megaswift/trainers/rl/scorer.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.data.prompts.source import Prompt
from megaswift.losses.sampler_correction import MODES
from megaswift.rewards.format_and_length_rewards import PerCompletionReward
from megaswift.run.policy_task import rl_settings
from megaswift.trainers.rl.advantages import AdvantageEstimator, padded_field, trained_token_mask
from megaswift.trainers.rl.completions_log import completion_line
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion
from megaswift.trainers.rl.scorer import RewardScorer
from tests.losses import test_ppo, trainers
from tests.losses.rollouts import DOCS, label_fields, models, rollouts
from tests.trainers.rl.makers import completed, config, rollout

GROUP = 4
TOTALS = [1.0, 0.0, 0.5, 2.0, 1.0, 0.25, -1.0, 1.0]
TWO = {"a": TOTALS, "b": [0.3, 0.2, 0.9, -4.0, 3.0, 3.0, 3.0, 3.0]}
WEIGHTS = (0.5, 2.0)


def estimator(**options: Any) -> AdvantageEstimator:
    cfg = config(**{"num_generations": GROUP, **options})
    settings = rl_settings(cfg, 1)
    return AdvantageEstimator(cfg.rl, settings, settings.beta)


def values() -> dict[str, list[torch.Tensor]]:
    """Log-probabilities of both models at each completion's tokens: the policy's count as the old ones."""
    old, reference = (label_fields(m, DOCS)["log_probs"] for m in models())
    return {"old": old, "reference": reference, "sampled": [o - 0.3 * torch.arange(len(o)) for o in old]}


def theirs(trl: Any, per_function: dict[str, list[float]], weights: tuple[float, ...], **more: Any) -> torch.Tensor:
    """TRL's advantages of the same."""
    rewards = torch.tensor([*per_function.values()]).T
    found = trainers.scored(
        trl,
        models(),
        rollouts(*models(), masked=False),
        rewards,
        num_generations=GROUP,
        reward_weights=torch.tensor(weights),
        **more,
    )
    return found["advantages"]


def ours(
    made: AdvantageEstimator,
    per_function: dict[str, list[float]],
    weights: tuple[float, ...],
    silent: tuple[int, ...] = (),
) -> list[np.ndarray]:
    rewards = [dict(zip(per_function, row, strict=True)) for row in zip(*per_function.values(), strict=True)]
    judged = [rollout(sum(w * r for w, r in zip(weights, row.values(), strict=True)), **row) for row in rewards]
    return made(judged, completed(values(), silent))["advantages"]


def assert_same(mine: list[np.ndarray], wanted: torch.Tensor) -> None:
    """One number a completion, at each of its tokens."""
    assert [len(v) for v in mine] == [len(v) for v in values()["old"]]
    for found, one in zip(mine, wanted.tolist(), strict=True):
        assert found.dtype == np.float32 and found == pytest.approx(one, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_is_trl_s(grpo: Any, scale: str) -> None:
    wanted = theirs(grpo, TWO, WEIGHTS, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize")
    made = estimator(scale_rewards=scale, reward_weights=WEIGHTS, reward_funcs=("format", "length"))
    assert_same(ours(made, TWO, WEIGHTS), wanted)


def test_normalized_first_is_trl_s(grpo: Any) -> None:
    wanted = theirs(grpo, TWO, WEIGHTS, multi_objective_aggregation="normalize_then_sum")
    made = estimator(
        multi_objective_aggregation="normalize_then_sum", reward_weights=WEIGHTS, reward_funcs=("format", "length")
    )
    assert_same(ours(made, TWO, WEIGHTS), wanted)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_is_trl_s(reinforce: Any, beta: float, normalize: bool) -> None:
    """The KL of k1 in the rewards, as rloo has it by default."""
    wanted = theirs(reinforce, {"a": TOTALS}, (1.0,), normalize_advantages=normalize, beta=beta, reward_clip_range=None)
    made = estimator(advantage_estimator="rloo", beta=beta, whiten_advantages=normalize)
    assert_same(ours(made, {"a": TOTALS}, (1.0,)), wanted)
    if beta:
        kl = [o - r for o, r in zip(values()["old"], values()["reference"], strict=True)]
        assert made.metrics["objective/kl"] == pytest.approx(float(torch.stack([k.sum() for k in kl]).mean()), rel=1e-5)
        assert made.metrics["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-5)


def test_silent_completions_count_and_have_no_numbers() -> None:
    mine = ours(estimator(), {"a": TOTALS}, (1.0,), silent=(1, 7))
    full = ours(estimator(), {"a": TOTALS}, (1.0,))
    assert [len(v) for v in mine] == [0 if i in (1, 7) else len(v) for i, v in enumerate(full)]
    assert all((v == w).all() for i, (v, w) in enumerate(zip(mine, full, strict=True)) if i not in (1, 7))


def test_all_silent() -> None:
    assert [len(v) for v in ours(estimator(), {"a": TOTALS}, (1.0,), silent=tuple(range(8)))] == [0] * 8


@pytest.mark.parametrize("least", [None, 1.2])
@pytest.mark.parametrize("mode", MODES)
def test_weights_against_the_sampler_are_bounded_by_hand(mode: str, least: float | None) -> None:
    made = estimator(
        importance_sampling_correction=True,
        importance_sampling_mode=mode,
        importance_sampling_clip_max=1.5,
        importance_sampling_clip_min=least,
    )
    found = made([rollout(t) for t in TOTALS], completed(values()))["ratio"]
    for ratio in found:
        gaps = 0.3 * np.arange(len(ratio))
        whole = {"token": gaps, "sequence": gaps.sum(), "geometric": gaps.mean()}[mode.partition("_")[0]]
        weights = np.exp(np.full(len(ratio), whole) if np.ndim(whole) == 0 else whole)
        outside = (weights > 1.5) | (weights < (least or 0.0))
        wanted = np.clip(weights, least or 0.0, 1.5) if mode.endswith("truncate") else np.where(outside, 0, weights)
        assert ratio == pytest.approx(wanted, rel=1e-5)


def test_completions_far_from_the_sampler_are_left_out() -> None:
    """The geometric mean of ratios 1, e^0.3, e^0.6, ... is e^(0.15 (n - 1))."""
    found = estimator(
        importance_sampling_correction=True,
        importance_sampling_clip_max=None,
        importance_sampling_filter_max=1.5,
        importance_sampling_filter_min=1.1,
    )([rollout(t) for t in TOTALS], completed(values()))["ratio"]
    kept = [1.1 <= math.exp(0.15 * (len(ratio) - 1)) <= 1.5 for ratio in found]
    assert any(kept) and not all(kept)
    for ratio, counts in zip(found, kept, strict=True):
        assert ratio == pytest.approx(np.exp(0.3 * np.arange(len(ratio))) * counts, rel=1e-5)


def test_tokens_that_the_sampler_could_not_tell_are_weighed_1() -> None:
    known = values()
    known["sampled"][0][:] = torch.nan
    made = estimator(importance_sampling_correction=True, importance_sampling_mode="token_mask")
    assert (made([rollout(t) for t in TOTALS], completed(known))["ratio"][0] == 1).all()


def test_the_weight_of_the_kl_follows_it() -> None:
    """Above the target: up by a fifth of 8 / 100; the cost is that of the weight before. A restart goes on from
    there."""
    made = estimator(advantage_estimator="rloo", beta=0.05, kl_controller="adaptive", target_kl=1e-6, kl_horizon=100)
    first = ours(made, {"a": TOTALS}, (1.0,))
    factor = 1.2 if made.metrics["objective/kl"] > 0 else 0.8
    assert made.metrics["objective/kl_coef"] == 0.05 and made.beta == pytest.approx(0.05 * (1 + (factor - 1) * 8 / 100))
    again = estimator(advantage_estimator="rloo", beta=0.05)
    again.load_state_dict(made.state_dict())
    assert again.beta == made.beta and not np.array_equal(ours(again, {"a": TOTALS}, (1.0,))[0], first[0])


@pytest.mark.parametrize("whiten", [None, False])
def test_gae_by_definition(whiten: bool | None) -> None:
    """The score at the last token, the cost of k1 at each; of `values` the sum of discounted differences. Whitened by
    default."""
    known = values()
    guesses = [torch.linspace(-0.5, 0.8, len(o)) for o in known["old"]]
    made = estimator(task="ppo", num_generations=1, beta=0.1, gamma=0.9, lam=0.8, whiten_advantages=whiten)
    found = made([rollout(t) for t in TOTALS], completed({**known, "values": guesses}))
    advantages, returns = [], []
    for total, old, reference, value in zip(TOTALS, known["old"], known["reference"], guesses, strict=True):
        reward = -0.1 * (old - reference).double()
        reward[-1] += total
        delta = [float(reward[t] + (0.9 * value[t + 1] if t + 1 < len(old) else 0) - value[t]) for t in range(len(old))]
        advantages.append(
            np.asarray([sum((0.9 * 0.8) ** (k - t) * delta[k] for k in range(t, len(old))) for t in range(len(old))])
        )
        returns.append(advantages[-1] + value.numpy())
    if whiten is None:
        every = np.concatenate(advantages)
        advantages = [(a - every.mean()) / every.std(ddof=1) for a in advantages]
    for i in range(len(TOTALS)):
        assert found["advantages"][i] == pytest.approx(advantages[i], rel=1e-4, abs=1e-5)
        assert found["returns"][i] == pytest.approx(returns[i], rel=1e-5, abs=1e-6)


def test_rewards_of_a_batch_at_one_deviation() -> None:
    """Deviation 1, the mean as it was; with gamma and lambda 1 and a critic that says 0, returns are the sums of what
    follows."""
    known = values()
    made = estimator(task="ppo", num_generations=1, beta=0.0, lam=1.0, whiten_rewards=True, whiten_advantages=False)
    found = made(
        [rollout(t) for t in TOTALS], completed({**known, "values": [torch.zeros(len(o)) for o in known["old"]]})
    )
    rewards = [np.asarray([0.0] * (len(o) - 1) + [t]) for o, t in zip(known["old"], TOTALS, strict=True)]
    every = np.concatenate(rewards)
    for mine, one in zip(found["returns"], rewards, strict=True):
        even = (one - every.mean()) / every.std(ddof=1) + every.mean()
        assert mine == pytest.approx([even[i:].sum() for i in range(len(even))], rel=1e-4, abs=1e-5)


def by_token() -> list[Any]:
    """Rewards of tokens for every other completion: 0.5, -0.25, 0.125, ...; the rest have TOTALS."""
    steps = [tuple((-0.5) ** (t + 1) * -1 for t in range(len(o))) for o in values()["old"]]
    return [
        replace(rollout(sum(some), len(some)), tokens=some) if i % 2 else rollout(t, len(some))
        for i, (t, some) in enumerate(zip(TOTALS, steps, strict=True))
    ]


def at_tokens(beta: float) -> list[torch.Tensor]:
    """What each token is worth, by hand: its reward, or the completion's at the last one, less beta times k1."""
    found = []
    for one, old, reference in zip(by_token(), values()["old"], values()["reference"], strict=True):
        rewards = -beta * (old - reference).double()
        rewards += torch.tensor(one.tokens or [0.0] * (len(old) - 1) + [one.total])
        found.append(rewards)
    return found


def test_gae_of_rewards_in_the_middle() -> None:
    """By definition: the sum of discounted differences from each token on."""
    known = values()
    guesses = [torch.linspace(-0.5, 0.8, len(o)) for o in known["old"]]
    made = estimator(task="ppo", num_generations=1, beta=0.1, gamma=0.9, lam=0.8, whiten_advantages=False)
    found = made(by_token(), completed({**known, "values": guesses}))
    for mine, returns, rewards, value in zip(
        found["advantages"], found["returns"], at_tokens(0.1), guesses, strict=True
    ):
        n = len(value)
        delta = [float(rewards[t] + (0.9 * value[t + 1] if t + 1 < n else 0) - value[t]) for t in range(n)]
        wanted = np.asarray([sum((0.9 * 0.8) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])
        assert mine == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert returns == pytest.approx(wanted + value.numpy(), rel=1e-4, abs=1e-5)


def test_rewards_of_tokens_in_a_second_implementation() -> None:
    """The loops of PPO's own test: lambda-returns, advantages whitened over all tokens."""
    known, (policy, reference) = values(), models()
    critic = torch.randn(test_ppo.TOKENS + 1, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    guesses = [critic[torch.tensor(d.ids[d.begin - 1 : -1])] for d in DOCS]
    judged = [
        replace(one, total=sum(one.tokens) if one.tokens else score)
        for one, score in zip(by_token(), test_ppo.SCORES, strict=True)
    ]
    made = estimator(task="ppo", num_generations=1, beta=test_ppo.KL, gamma=test_ppo.GAMMA, lam=test_ppo.LAM)
    found = made(judged, completed({**known, "values": guesses}))
    wanted = test_ppo.told(
        policy,
        reference,
        critic,
        [torch.ones(len(o)) for o in known["old"]],
        {i: one.tokens for i, one in enumerate(judged) if one.tokens},
    )
    assert np.concatenate(found["advantages"]) == pytest.approx([t.advantage for t in wanted], rel=1e-4, abs=1e-5)
    assert np.concatenate(found["returns"]) == pytest.approx([t.target for t in wanted], rel=1e-4, abs=1e-5)


TURNS = MultiTurnCompletion(
    (10, 11, 20, 21, 12), (-1.0, -1.0, -1.0), True, (True, True, False, False, True), (), (1.0, 2.0), (2, 3), 2
)
"""Two tokens of the model, two of its environment, which gives 1, one of the model, for which it gives 2."""


def episode(given: PerCompletionReward | None = None, **options: Any) -> Any:
    """What an estimator makes of TURNS; values 0.5, 0.25, 1; `given`: a reward function beside the environment."""
    judge = RewardScorer([given] if given else [], [1.0] if given else [], lambda ids: "")
    judged = judge([Prompt(0, (3, 4), "Q", {})] * 2, [TURNS, TURNS], range(2))
    known = {
        n: [torch.tensor(v)] * 2
        for n, v in (("old", [-1.0] * 3), ("reference", [-1.0] * 3), ("values", [0.5, 0.25, 1.0]))
    }
    made = estimator(
        task="ppo", num_generations=1, global_batch_size=2, gamma=0.5, lam=0.5, whiten_advantages=False, **options
    )
    return judged[0], {name: numbers[0].tolist() for name, numbers in made(judged, completed(known)).items()}


def test_gae_of_an_episode_of_two_turns() -> None:
    """By hand. Differences: 0 + 0.25 / 2 - 0.5 = -0.375; 1 + 1 / 2 - 0.25 = 1.25; 2 - 1 = 1. What tools write passes no
    time."""
    judged, found = episode()
    assert judged.total == 3.0 and judged.rewards == {"environment": 3.0}
    assert found["advantages"] == [-0.375 + 1.5 / 4, 1.25 + 1 / 4, 1.0] and found["returns"] == [0.5, 1.75, 2.0]
    line = completion_line(1, judged, np.zeros(3))
    assert line["turn_rewards"] == (1.0, 2.0) and "token_rewards" not in line


@pytest.mark.parametrize(("gives", "rewards"), [(0.5, [0, 1, 2.5]), ((0.125, 0.25, 0.5), [0.125, 1.25, 2.5])])
def test_turns_beside_a_reward_function(gives: Any, rewards: list[float]) -> None:
    """A number for the whole stands at the last token, those of tokens at theirs."""
    judged, found = episode(PerCompletionReward("worth", lambda sample: gives))
    assert judged.by_token == rewards and judged.total == sum(rewards)
    last = rewards[2] - 1
    middle = rewards[1] + 0.5 - 0.25 + last / 4
    assert found["advantages"] == [rewards[0] + 0.125 - 0.5 + middle / 4, middle, last]


@pytest.mark.parametrize(
    ("own", "ends", "rewards"), [((), (0,), []), ((True,), (0, 1), [3.0]), ((True, True), (1, 1, 2), [3.0, 4.0])]
)
def test_turns_without_a_token(own: tuple[bool, ...], ends: tuple[int, ...], rewards: list[float]) -> None:
    talk = replace(TURNS, own=own, rewards=(1.0, 2.0, 4.0)[: len(ends)], ends=ends)
    (judged,) = RewardScorer([], [], lambda ids: "")([Prompt(0, (3, 4), "Q", {})], [talk], range(1))
    assert judged.by_token == rewards


def test_estimators_of_turns() -> None:
    """reinforce_plus_plus: returns 3, 3, 2 and twice as much, less 9/2, the mean of 3 and 6, at every token; their mean
    -1/2 off, over their deviation. grpo: the sums 3 and 6."""
    twice = replace(TURNS, rewards=(2.0, 4.0))
    judged = RewardScorer([], [], lambda ids: "")([Prompt(0, (3, 4), "Q", {})] * 2, [TURNS, twice], range(2))
    some = completed({"old": [torch.zeros(3)] * 2})
    found = {
        kind: estimator(advantage_estimator=kind, num_generations=2, global_batch_size=2)(judged, some)["advantages"]
        for kind in ("reinforce_plus_plus", "grpo")
    }
    wanted = np.asarray([-1.5, -1.5, -2.5, 1.5, 1.5, -0.5])
    wanted = (wanted - wanted.mean()) / wanted.std(ddof=1)
    assert np.concatenate(found["reinforce_plus_plus"]) == pytest.approx(wanted, rel=1e-5)
    assert np.concatenate(found["grpo"]) == pytest.approx(
        [-1.5 / (4.5**0.5 + 1e-4)] * 3 + [1.5 / (4.5**0.5 + 1e-4)] * 3, rel=1e-5
    )


def test_silent_completions_of_rewards_of_tokens() -> None:
    guesses = [torch.zeros(len(o)) for o in values()["old"]]
    made = estimator(task="ppo", num_generations=1, beta=0.1)
    found = made(by_token(), completed({**values(), "values": guesses}, silent=(1,)))["advantages"]
    assert len(found[1]) == 0 < len(found[3])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reinforce_plus_plus_of_rewards_in_the_middle(beta: float) -> None:
    """A token's return is what comes from it on; less the mean of its group's scores (without the KL), normalized over
    all tokens."""
    made = estimator(advantage_estimator="reinforce_plus_plus", beta=beta)
    found = made(by_token(), completed(values()))["advantages"]
    returns = [np.asarray([float(rewards[t:].sum()) for t in range(len(rewards))]) for rewards in at_tokens(beta)]
    centered = []
    for start in range(0, len(returns), GROUP):
        scores = [one.total for one in by_token()[start : start + GROUP]]
        centered += [r - np.mean(scores) for r in returns[start : start + GROUP]]
    every = np.concatenate(centered)
    for mine, wanted in zip(found, centered, strict=True):
        assert mine == pytest.approx((wanted - every.mean()) / every.std(ddof=1), rel=1e-4, abs=1e-5)


def test_stale_samples_of_the_transformers_sampler_are_weighed() -> None:
    """Asynchronous generation: what the policy has become since, over what the sampler had."""
    made = estimator(async_generation=True)
    assert made.settings.corrects and made.settings.needs_old
    found = made([rollout(t) for t in TOTALS], completed(values()))["ratio"]
    for ratio in found:
        assert ratio == pytest.approx(np.minimum(np.exp(0.3 * np.arange(len(ratio))), 3.0), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"advantage_estimator": "rloo"}, {"scale_rewards": "none"}])
def test_comparisons_within_a_group_take_the_sum_of_rewards_of_tokens(options: dict[str, Any]) -> None:
    made = estimator(**options)
    found, wanted = (
        made(some, completed(values()))["advantages"]
        for some in (by_token(), [replace(r, tokens=None) for r in by_token()])
    )
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True)) and any(a.any() for a in found)


def test_numbers_stand_from_the_left() -> None:
    some = completed({"old": [torch.tensor([1.0, 2, 3]), torch.tensor([4.0]), torch.tensor([5.0, 6])]}, silent=(1,))
    mask = trained_token_mask(some)
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert padded_field(some, "old", mask).tolist() == [[1, 2, 3], [0, 0, 0], [5, 6, 0]]


def test_clip_cov_selects_no_clipped_token() -> None:
    """All tokens are candidates; those that the old policy's ratio clips already are never selected (as in verl)."""
    chosen = estimator(
        loss_type=("clip_cov",),
        clip_cov_ratio=1.0,
        clip_cov_lb=-100.0,
        clip_cov_ub=100.0,
        epsilon=0.2,
        num_iterations=2,
    ).select_tokens(
        [np.log(np.array([0.6, 0.3], np.float32)), np.log(np.array([0.3, 0.1], np.float32))],
        [np.array([1.0, 1.0], np.float32), np.array([-1.0, -1.0], np.float32)],
        [np.log(np.array([0.4, 0.3], np.float32)), np.log(np.array([0.2, 0.2], np.float32))],
        [1, 2, 3],
    )
    assert [c.tolist() for c in chosen] == [[False, True], [True, False]]  # ratios 1.5, 1 and, below 0, 1.5, 0.5
