"""Clip-Cov and KL-Cov: which tokens are selected, and what the losses are, worked out in plain Python."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import (
    PolicySettings,
    clip_cov_token_mask,
    kl_cov_token_mask,
    ratio_clipped_token_mask,
    token_covariances,
)
from tests.losses.bigram import run
from tests.losses.rollouts import label_fields, models, rollouts

LOGPROBS = [-0.1, -2.0, -0.7, -3.0, -1.2, -0.4, -0.6]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0, 0.5, 0.5, -1.0]


def by_hand() -> list[float]:
    means = statistics.fmean(LOGPROBS), statistics.fmean(ADVANTAGES)
    return [(p - means[0]) * (a - means[1]) for p, a in zip(LOGPROBS, ADVANTAGES, strict=True)]


def covariances() -> torch.Tensor:
    return token_covariances(torch.tensor(LOGPROBS), torch.tensor(ADVANTAGES))


def test_covariances_by_hand() -> None:
    assert covariances().tolist() == pytest.approx(by_hand(), rel=1e-6)


@pytest.mark.parametrize(("ratio", "count"), [(0.0002, 1), (0.3, 2), (0.43, 3), (1.0, 7)])
def test_kl_cov_selects_the_largest(ratio: float, count: int) -> None:
    largest = sorted(range(7), key=lambda i: -by_hand()[i])[:count]
    assert kl_cov_token_mask(covariances(), ratio).nonzero().flatten().tolist() == sorted(largest)


def test_clip_cov_draws_evenly_between_the_bounds() -> None:
    """Each candidate alike: over 3000 seeds a share of 1 / candidates within four standard deviations."""
    candidates = [i for i, c in enumerate(by_hand()) if 0.2 < c < 1.9]
    assert 2 < len(candidates) < 7
    drawn = [
        clip_cov_token_mask(covariances(), 0.2, (0.2, 1.9), seed).nonzero().flatten().tolist() for seed in range(3000)
    ]
    assert {len(d) for d in drawn} == {1} and {d[0] for d in drawn} == {*candidates}
    share = 1 / len(candidates)
    for i in candidates:
        assert abs(sum(d == [i] for d in drawn) / 3000 - share) < 4 * math.sqrt(share * (1 - share) / 3000)
    assert clip_cov_token_mask(covariances(), 1.0, (0.2, 1.9), 0).nonzero().flatten().tolist() == candidates
    assert not clip_cov_token_mask(covariances(), 0.5, (50.0, 60.0), 0).any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_losses_by_hand(name: str) -> None:
    """Every second token is selected; token by token, over all tokens, in every layout."""
    both = models()
    data = rollouts(*both).without("sampled")
    selected = [torch.arange(len(a)) % 2 == 0 for a in data.known["advantages"]]
    data = replace(data, known={**data.known, "selected": selected})
    total = count = 0.0
    logprobs = label_fields(both[0], data.docs)["log_probs"]
    for i, advantages in enumerate(data.known["advantages"]):
        for t in range(len(advantages)):
            if not data.learnt[i][t]:
                continue
            a, log_ratio = float(advantages[t]), float(logprobs[i][t] - data.known["old"][i][t])
            ratio = math.exp(log_ratio)
            if name == "clip_cov":
                value = -min(ratio * a, min(max(ratio, 0.8), 1.2) * a) * (not selected[i][t])
            else:
                value = -ratio * a + 0.7 * abs(log_ratio) * bool(selected[i][t])
            total, count = total + value, count + 1
    loss = PolicyLoss(name, PolicySettings(0.2, kl_cov_coef=0.7))
    for layout in data.layouts():
        value, gradient, _ = run(loss, both[0], layout)
        assert value == pytest.approx(total / count, rel=1e-9) and gradient.abs().sum() > 0


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
def test_the_normalizer_by_hand(mode: str) -> None:
    """grpo's formula under each normalizer; a completion without labels counts as one."""
    both = models()
    data = rollouts(*both).without("sampled")
    logprobs, sums, counts = label_fields(both[0], data.docs)["log_probs"], [], []
    for i, advantages in enumerate(data.known["advantages"]):
        values = [
            -min(
                (r := math.exp(float(logprobs[i][t] - data.known["old"][i][t]))) * float(advantages[t]),
                min(max(r, 0.8), 1.2) * float(advantages[t]),
            )
            for t in range(len(advantages))
            if data.learnt[i][t]
        ]
        sums.append(math.fsum(values))
        counts.append(len(values))
    wanted = {
        "token-mean": sum(sums) / sum(counts),
        "seq-mean-token-sum": sum(sums) / 8,
        "seq-mean-token-mean": sum(s / (n or 1) for s, n in zip(sums, counts, strict=True)) / 8,
        "seq-mean-token-sum-norm": sum(sums) / 8 / 11,
    }[mode]
    loss = PolicyLoss("grpo", loss_agg_mode=mode, max_completion_length=11)
    for layout in data.layouts():
        assert run(loss, both[0], layout)[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("one", "other"),
    [("grpo", "dapo"), ("dapo", "grpo"), ("dr_grpo", "dapo"), ("luspo", "grpo")],
)
def test_a_loss_with_another_s_normalizer_is_the_other_loss(one: str, other: str) -> None:
    """These differ in nothing but their normalizer."""
    both = models()
    batch = rollouts(*both).without("sampled").batch(True)
    wanted = PolicyLoss(other, max_completion_length=9)
    borrowed = PolicyLoss(one, max_completion_length=9, loss_agg_mode=wanted.agg_mode)
    first, second = run(wanted, both[0], [batch]), run(borrowed, both[0], [batch])
    assert first[0] == second[0] and torch.equal(first[1], second[1])


def test_clipped_tokens_by_hand() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5 and 1.1 with bounds 0.8 and 1.28: clipped where a larger step is not rewarded."""
    log_ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert ratio_clipped_token_mask(log_ratios, advantages, 0.2, 0.28).tolist() == [True, False, False, True, False]
