"""Advantages against what TRL's trainers make of the same rewards; PPO's, which TRL dropped, by definition and by
hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.losses.advantages import (
    entropy_threshold,
    gae,
    group_advantages,
    groups_without_spread,
    kl_estimate,
    kl_penalized_token_rewards,
    masked_moments,
    multi_reward_group_advantages,
    next_kl_coefficient,
    reinforce_plus_plus,
    rloo_advantages,
    weighted_sum,
    whiten,
)
from megaswift.losses.document_segments import document_index
from megaswift.trainers.rl.options.derived import weighs_kl_by_ratio
from tests.losses import trainers
from tests.losses.rollouts import DOCS, label_fields, models, rollouts

GROUP = 4
N = torch.nan
REWARDS = {
    name: r.double()
    for name, r in {
        "one": torch.tensor([[1.0, 0, 0.5, 2.0, 1, 1, 1, 1]]).T,
        "several": torch.tensor(
            [[1.0, 0, 0.5, 2.0, 1, 0, 0, 1], [0.3, 0.2, 0.9, -4, 3, 3, 3, 3], [10.0, 20, -7, 3, 0, 4, 5, 1]]
        ).T,
        "not given": torch.tensor([[1.0, N, 0.5, N, N, 1, 2, 3], [0.3, N, N, 4, 0.7, 0.5, N, 3]]).T,
        "all but one not given": torch.tensor([[N, N, 0.5, N, 1.0, 1, 2, 3]]).T,
    }.items()
}
WEIGHTS = torch.tensor([0.7, 2.0, 0.05], dtype=torch.float64)


def scored(trl: Any, per_function: Tensor, **more: Any) -> dict[str, Tensor]:
    """What TRL's trainer makes of these rewards."""
    more = {"reward_weights": WEIGHTS[: per_function.shape[1]], "num_generations": GROUP, **more}
    return trainers.scored(trl, models(), rollouts(*models()), per_function, **more)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.abs().max() > 0.1, "advantages that prove nothing"
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)  # TRL holds n / (n - 1) in float32


@pytest.mark.parametrize("case", REWARDS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trl_s(grpo: Any, case: str, scale: str) -> None:
    r = REWARDS[case]
    expected = scored(grpo, r, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize")["advantages"]
    noted = trainers.metrics(grpo)
    weights = WEIGHTS[: r.shape[1]]
    assert_equal(multi_reward_group_advantages(r, weights, GROUP, "sum_then_normalize", scale), expected)
    total = weighted_sum(r, weights)
    assert_equal(group_advantages(total, GROUP, scale), expected)
    assert noted["reward"] == pytest.approx(total.nanmean().item())
    if scale != "batch":
        assert noted["frac_reward_zero_std"] == groups_without_spread(total, GROUP).float().mean().item()


@pytest.mark.parametrize("case", REWARDS)
def test_normalize_then_sum_is_trl_s(grpo: Any, case: str) -> None:
    r = REWARDS[case]
    expected = scored(grpo, r, multi_objective_aggregation="normalize_then_sum")["advantages"]
    assert_equal(multi_reward_group_advantages(r, WEIGHTS[: r.shape[1]], GROUP, "normalize_then_sum"), expected)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("case", REWARDS)
def test_rloo_is_trl_s(reinforce: Any, case: str, beta: float, normalize: bool) -> None:
    """With the KL in the rewards: the sum over a completion of k1."""
    r = REWARDS[case]
    expected = scored(reinforce, r, normalize_advantages=normalize, beta=beta, reward_clip_range=None)["advantages"]
    policy, reference = (label_fields(m, DOCS)["log_probs"] for m in models())
    kl = torch.stack([kl_estimate(p, q, "k1").sum() for p, q in zip(policy, reference, strict=True)])
    ours = rloo_advantages(weighted_sum(r, WEIGHTS[: r.shape[1]]) - beta * kl, GROUP, normalize)
    assert_equal(ours, expected)


def test_high_entropy_tokens_are_trl_s(grpo: Any) -> None:
    entropies = torch.rand(5, 11, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(1)) > 0.3
    for share in (0.0, 0.2, 0.7, 1.0):
        ours = (entropies >= entropy_threshold(entropies[mask], share)) & mask
        assert torch.equal(ours, grpo.get_high_entropy_mask(entropies, mask, 1 - share))


def test_groups_without_spread() -> None:
    assert groups_without_spread(torch.tensor([1.0, 1, 1, 0.1, 0.1, 0.10001, 5, 5, 5]), 3).tolist() == [
        True,
        False,
        True,
    ]


def test_a_group_of_one_teaches_nothing() -> None:
    for found in (
        group_advantages(torch.tensor([3.0, 4.0]), 1),
        rloo_advantages(torch.tensor([3.0, 4.0]), 1),
        group_advantages(torch.tensor([N, N, 1.0, 2.0]), 2, "none")[:2],
    ):
        assert found.tolist() == [0, 0]


def test_reinforce_plus_plus_by_hand() -> None:
    """Completions of 3, 1 and 2 tokens with scores 2, 5 and nothing, whose KL costs 1/2 at each token. From each token
    on: 1/2, 1, 3/2 and 9/2, of mean 15/8. The unscored completion moves no mean and has advantage 0."""
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    totals = torch.tensor([2.0, 5.0, N])
    rewards = -0.5 * mask.float()
    rewards[0, 2] += 2.0
    rewards[1, 0] += 5.0
    wanted = torch.tensor([0.5, 1.0, 1.5, 4.5])
    wanted = (wanted - wanted.mean()) / wanted.std()
    found = reinforce_plus_plus(rewards, totals, mask)
    torch.testing.assert_close(found[mask], torch.cat([wanted, torch.zeros(2)]))
    assert found[~mask].abs().max() == 0
    # Half of what comes a token later counts: -1/2 + 1/2 x (-1/2 + 1/2 x 3/2), -1/2 + 1/2 x 3/2, 3/2, 9/2.
    halved = torch.tensor([-0.375, 0.25, 1.5, 4.5])
    halved = (halved - halved.mean()) / halved.std()
    torch.testing.assert_close(reinforce_plus_plus(rewards, totals, mask, gamma=0.5)[mask][:4], halved)


def test_reinforce_plus_plus_with_a_baseline_by_hand() -> None:
    """Groups of two: scores 2 and 5 less 7/2, at every token of the completion whatever its length."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = torch.tensor([[0.0, 0, 2], [5, 0, 0]])
    centered = torch.tensor([-1.5, -1.5, -1.5, 1.5])
    wanted = (centered - centered.mean()) / centered.std()
    torch.testing.assert_close(reinforce_plus_plus(rewards, torch.tensor([2.0, 5.0]), mask, 2)[mask], wanted)


def test_estimates_of_the_kl() -> None:
    """k1 and k3 over the whole vocabulary, each token by its probability, are the KL itself; k2 is a half squared
    difference."""
    p, q = (
        torch.randn(50, generator=torch.Generator().manual_seed(i), dtype=torch.float64).log_softmax(-1) for i in (0, 1)
    )
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind)).sum(), kl)
    assert kl_estimate(torch.tensor(-1.0), torch.tensor(-4.0), "k2").item() == 4.5
    assert (kl_estimate(p, q) >= 0).all()
    for x in (p, q):
        assert kl_estimate(x, x).abs().max() == 0


@pytest.mark.parametrize(("kind", "corrected"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_kl_s_gradient_is_that_of_the_divergence(kind: str, corrected: bool) -> None:
    """Over all outcomes of one token, on policy, as the defaults have it. The two that rules refuse are far off."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    logp, reference = logits.log_softmax(-1), torch.randn(6, generator=g, dtype=torch.float64).log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), [logits], retain_graph=True)

    def mean_gradient(with_ratio: bool) -> torch.Tensor:
        ratio = (logp - logp.detach()).exp() if with_ratio else 1.0
        kl = kl_estimate(logp, reference, kind) * ratio
        return torch.autograd.grad((logp.detach().exp() * kl).sum(), [logits], retain_graph=True)[0]

    torch.testing.assert_close(mean_gradient(corrected), exact)
    assert SwiftConfig(task="grpo", beta=0.1, kl_estimator=kind).rl.use_bias_correction_kl is None
    assert weighs_kl_by_ratio(SwiftConfig(task="grpo", beta=0.1, kl_estimator=kind)) is corrected
    assert kind == "k3" or (mean_gradient(not corrected) - exact).norm() > 0.15 * exact.norm()


def test_k3_far_from_the_reference_is_finite() -> None:
    """With its gradient, in float32; within 20 nats it is what it was."""
    away = torch.tensor([-500.0, -20.0, 0.5, 500.0], requires_grad=True)
    found = kl_estimate(away, torch.zeros(4))
    (gradient,) = torch.autograd.grad(found.sum(), [away])
    assert found.isfinite().all() and gradient.isfinite().all()
    assert found[2].item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum over all later steps of (gamma lam)^l delta."""
    after = [*values[1:], 0.0][: len(values)]
    delta = [r + gamma * a - v for r, a, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.8, 0.7), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_its_definition(gamma: float, lam: float) -> None:
    """Padded and packed, tokens of a tool left out."""
    data = rollouts(*models())
    r, v = data.known["old"], data.known["sampled"]
    expected = [
        by_definition(a[m].tolist(), b[m].tolist(), gamma, lam) for a, b, m in zip(r, v, data.learnt, strict=True)
    ]
    flat = torch.tensor([x for e in expected for x in e], dtype=torch.float64)
    for packed in (False, True):
        b = data.batch(packed)
        mask = b.loss_weights != 0
        # What stands outside of the mask must not matter.
        rewards, values = (torch.where(mask, b.fields[n], 99.0) for n in ("old", "sampled"))
        advantages, returns = gae(rewards, values, mask, gamma, lam, document_index(b) if packed else None)
        torch.testing.assert_close(advantages[mask], flat, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns[mask], flat + b.fields["sampled"][mask], rtol=1e-12, atol=1e-12)
        assert advantages[~mask].abs().max() == 0 and returns[~mask].abs().max() == 0


def test_gae_by_hand() -> None:
    """gamma 1/2, lambda 1/2: deltas 0 + 2 - 2 = 0, 0 + 1 - 4 = -3, 8 - 2 = 6."""
    mask = torch.tensor([[True, True, False, True]])
    advantages, returns = gae(torch.tensor([[0.0, 0, 7, 8]]), torch.tensor([[2.0, 4, 7, 2]]), mask, 0.5, 0.5)
    assert advantages.tolist() == [[0 - 3 / 4 + 6 / 16, -3 + 6 / 4, 0, 6]]
    assert returns.tolist() == [[2 - 3 / 8, 2.5, 0, 8]]


@pytest.mark.parametrize("packed", [False, True])
def test_the_score_is_the_reward_of_the_last_token(packed: bool) -> None:
    data = rollouts(*models())
    data.learnt[7][-1] = False  # a completion that ends in a tool's token
    b = data.batch(packed)
    mask = b.loss_weights != 0
    scores = torch.arange(1.0, 9)
    found = kl_penalized_token_rewards(scores, b.fields["old"], mask, document_index(b))
    expected = []
    for i, (kl, m) in enumerate(zip(data.known["old"], data.learnt, strict=True)):
        mine = (-kl)[m]
        mine[-1:] += scores[i]
        expected.append(mine)
    torch.testing.assert_close(found[mask], torch.cat(expected))
    assert found[~mask].abs().max() == 0


def test_whitening() -> None:
    """Mean 0 and variance 1 in the mask; by the moments of several parts as by those of the whole."""
    x = 3 + 2 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(1)) > 0.4
    whole = whiten(x, mask)
    assert (
        abs(whole[mask].mean().item()) < 1e-12
        and abs(whole[mask].var().item() - 1) < 1e-7
        and whole[~mask].abs().max() == 0
    )
    total = masked_moments(x[:2], mask[:2]) + masked_moments(x[2:], mask[2:])
    torch.testing.assert_close(torch.cat([whiten(x[:2], mask[:2], total), whiten(x[2:], mask[2:], total)]), whole)
    assert abs(whiten(x, mask, shift_mean=False)[mask].mean().item() - x[mask].mean().item()) < 1e-12
    assert whiten(x[:, :0], mask[:, :0]).shape == (6, 0)
    assert whiten(x[:1, :1], torch.tensor([[True]])).isfinite().all()


def test_the_controller_of_the_kl() -> None:
    """Twice the target is cut to a fifth; a little above it is not."""
    assert next_kl_coefficient(0.1, 12.0, 6.0, 100, 1000) == pytest.approx(0.1 * 1.02)
    assert next_kl_coefficient(0.1, 0.0, 6.0, 100, 1000) == pytest.approx(0.1 * 0.98)
    assert next_kl_coefficient(0.1, 6.3, 6.0, 100, 1000) == pytest.approx(0.1 * 1.005)


def test_unknown_names_are_ours_to_prevent() -> None:
    for call in (
        lambda: group_advantages(torch.ones(2), 2, "all"),
        lambda: multi_reward_group_advantages(torch.ones(2, 1), torch.ones(1), 2, "sum"),
        lambda: kl_estimate(torch.ones(1), torch.ones(1), "k4"),
    ):
        with pytest.raises(AssertionError):
            call()
