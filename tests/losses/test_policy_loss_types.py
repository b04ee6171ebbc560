"""Formulas that TRL has not, or not as a default: CISPO's cap, GSPO-token, ratios beyond float32."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megaswift.losses.contract import Batch, ModelOutputs
from megaswift.losses.policy import LEVELS, PolicyLoss
from megaswift.losses.policy_loss_types import LOSS_TYPES, PolicySettings
from tests.losses.bigram import Bigram, assert_same, run
from tests.losses.rollouts import Rollouts, label_fields, models, rollouts


def test_cispo_s_cap_is_5_by_default() -> None:
    """A ratio of 1 counts as 1: REINFORCE. One of 8 counts as 5. `epsilon` is not read."""
    both = models()
    data = rollouts(*both).without("sampled")
    logprobs = label_fields(both[0], data.docs)["log_probs"]
    known = {**data.known, "old": [p - math.log(8) for p in logprobs]}
    away, on = replace(data, known=known), data.without("old")
    gradients = [run(PolicyLoss("cispo", PolicySettings(epsilon=0.3)), both[0], [d.batch(True)])[1] for d in (on, away)]
    assert_same((0.0, 5 * gradients[0]), (0.0, gradients[1]))
    logp, expected = both[0].weight.log_softmax(-1), torch.zeros(())
    for d, a, m in zip(data.docs, data.known["advantages"], data.learnt, strict=True):
        expected = expected - logp[d.ids[d.begin - 1 : -1], d.ids[d.begin :]][m].sum() * a[0]
    (wanted,) = torch.autograd.grad(expected / sum(int(m.sum()) for m in data.learnt), [both[0].weight])
    assert_same((0.0, gradients[0]), (0.0, wanted))


def gspo_token(both: tuple[Bigram, Bigram], data: Rollouts, epsilon: float) -> tuple[float, torch.Tensor]:
    """arXiv 2507.18071, eq. 13 to 15, completion by completion in plain torch, under grpo's normalizer."""
    logp, total = both[0].weight.log_softmax(-1), torch.zeros(())
    for i, d in enumerate(data.docs):
        m = data.learnt[i]
        mine, old, advantages = (
            logp[d.ids[d.begin - 1 : -1], d.ids[d.begin :]][m],
            data.known["old"][i][m],
            data.known["advantages"][i][m],
        )
        if len(mine):
            whole = (mine - old).mean().exp().detach()
            ratio = whole * mine.exp() / mine.exp().detach()
            total = total - torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages).mean()
    (gradient,) = torch.autograd.grad(total / len(data.docs), [both[0].weight])
    return float(total.detach()) / len(data.docs), gradient


def test_gspo_token_keeps_the_advantages_of_tokens() -> None:
    """Equal to GSPO where a completion's advantages are equal; else each token has its own, which GSPO averages."""
    both, epsilon = models(), 0.03
    data = rollouts(*both).without("sampled")
    level = {name: PolicyLoss("grpo", PolicySettings(epsilon), name) for name in ("sequence", "sequence_token")}
    for microbatches in data.layouts():
        value, gradient, _ = run(level["sequence_token"], both[0], microbatches)
        assert_same((value, gradient), run(level["sequence"], both[0], microbatches)[:2])
        assert_same((value, gradient), gspo_token(both, data, epsilon))
    g = torch.Generator().manual_seed(3)
    each = [torch.randn(len(a), generator=g, dtype=torch.float64) for a in data.known["advantages"]]
    varied = replace(data, known={**data.known, "advantages": each})
    for microbatches in varied.layouts():
        value, gradient, _ = run(level["sequence_token"], both[0], microbatches)
        assert_same((value, gradient), gspo_token(both, varied, epsilon))
    averaged = run(level["sequence"], both[0], varied.layouts()[0])[1]
    assert (averaged - gradient).norm() > 0.3 * gradient.norm()


@pytest.mark.parametrize("name", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_of_any_size_are_finite(name: str, level: str) -> None:
    """Far from the old policy, in float32, up or down: 5000 tokens x 0.02 nats are past its range for a product; what
    stands outside of the mask counts for nothing."""
    length = 5000
    tokens = torch.zeros(1, length + 1, dtype=torch.long)
    labeled = torch.ones(1, length + 1)
    labeled[0, 0] = labeled[0, -1] = 0
    for step in (0.02, 0.5, -0.5, 100.0, -100.0):
        logprobs = torch.full((1, length + 1), -1.0, requires_grad=True)
        old = torch.where(labeled != 0, -1.0 - step, math.inf if step < 0 else -math.inf)
        known = {
            "completions": torch.tensor([0]),
            "advantages": -labeled,
            "old": old,
            "reference": torch.where(labeled != 0, old, 0.0),
        }
        positions, valid = torch.arange(length + 1).unsqueeze(0), torch.ones_like(tokens, dtype=torch.bool)
        b = Batch(tokens, tokens, labeled, positions, valid, fields=known)
        loss = PolicyLoss(name, importance_sampling_level=level, beta=0.1, max_completion_length=length)
        terms, _ = loss(ModelOutputs(logprobs=logprobs, entropy=torch.ones(1, length + 1)), b)
        (gradient,) = torch.autograd.grad(sum((t.sum * t.weight for t in terms), torch.zeros(())), [logprobs])
        assert all(t.sum.isfinite() for t in terms) and gradient.isfinite().all(), step
