"""The critic's loss, by hand and against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch, Metric, ModelOutputs
from megaswift.losses.value import ValueLoss, explained_variance
from tests.losses.bigram import assert_same, reduced
from tests.losses.rollouts import TOKENS, Rollouts, models, rollouts


def run(loss: ValueLoss, weight: Tensor, microbatches: list[Batch]) -> tuple[float, Tensor, dict[str, float]]:
    """A critic with a value for each token."""
    count = sum(loss.counts(b)["completion_tokens"] for b in microbatches) or 1.0
    total, parts = torch.zeros((), dtype=torch.float64), []
    for b in microbatches:
        terms, metrics = loss(ModelOutputs(values=weight[b.input_ids] * (b.loss_weights != 0)), b)
        total = total + sum(t.weight * t.sum / count for t in terms)
        found: dict[str, Metric] = dict(metrics)
        parts.append(found)
    (gradient,) = torch.autograd.grad(total, [weight])
    return total.item(), gradient, reduced(parts)


def critic() -> Tensor:
    return torch.randn(TOKENS + 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


def data(weight: Tensor) -> Rollouts:
    made, g = rollouts(*models()), torch.Generator().manual_seed(4)

    def near(by: float) -> list[Tensor]:
        return [
            weight.detach()[torch.tensor(d.ids[d.begin - 1 : -1])]
            + by * torch.randn(len(d.ids) - d.begin, generator=g).double()
            for d in made.docs
        ]

    return replace(made, known={"values": near(0.4), "returns": near(1.0)})


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_and_gradient_are_plain_torch_s(clip: float | None) -> None:
    """Token by token, for each completion."""
    weight = critic()
    d = data(weight)
    losses, held = [], 0
    for doc, old, target, m in zip(d.docs, d.known["values"], d.known["returns"], d.learnt, strict=True):
        for i in range(len(old)):
            if m[i]:
                v = weight[doc.ids[doc.begin - 1 + i]]
                free = 0.5 * (v - target[i]) ** 2
                near = v if clip is None else min(max(v, old[i] - clip), old[i] + clip)
                kept = 0.5 * (near - target[i]) ** 2
                held += int(kept > free)
                losses.append(kept if kept > free else free)
    (gradient,) = torch.autograd.grad(sum(losses) / len(losses), [weight])
    expected = (sum(x.item() for x in losses) / len(losses), gradient)
    for microbatches in d.layouts():
        value, found, metrics = run(ValueLoss(clip), weight, microbatches)
        assert_same((value, found), expected)
        assert metrics["vf_loss"] == pytest.approx(expected[0]) and metrics["vf_clip_ratio"] == pytest.approx(
            held / len(losses)
        )
        mask, returns = torch.cat(d.learnt), torch.cat(d.known["returns"])
        left = returns - torch.cat([weight.detach()[torch.tensor(x.ids[x.begin - 1 : -1])] for x in d.docs])
        assert explained_variance(metrics) == pytest.approx((1 - left[mask].var() / returns[mask].var()).item())
    assert clip is None or held > 3


def test_by_hand() -> None:
    """Old value 1, new 2, return 3: held at 1.2, 1.8^2 / 2, no gradient. New 0.9: not held, 2.1^2 / 2."""
    made = rollouts(*models()).part(slice(1, 2))
    one = torch.ones(2, dtype=torch.float64)
    b = replace(made, known={"values": [one], "returns": [3 * one]}).batch(False)
    weight = torch.zeros(TOKENS + 1, dtype=torch.float64)
    places = b.input_ids[b.loss_weights != 0]
    weight[places] = torch.tensor([2.0, 0.9], dtype=torch.float64)
    value, gradient, metrics = run(ValueLoss(0.2, vf_coef=0.5), weight.requires_grad_(), [b])
    assert value == pytest.approx(0.5 * (1.8**2 + 2.1**2) / 4)
    assert gradient[places].tolist() == pytest.approx([0, -0.5 * 2.1 / 2])
    assert metrics["vf_loss"] == pytest.approx((1.8**2 + 2.1**2) / 4) and metrics["vf_clip_ratio"] == 0.5
    assert explained_variance(metrics) is None


def test_fillers_alone_have_no_loss() -> None:
    weight = critic()
    for packed in (False, True):
        value, gradient, metrics = run(ValueLoss(), weight, [data(weight).part(slice(0, 0)).batch(packed)])
        assert value == 0 and gradient.abs().max() == 0 and metrics == {} and explained_variance(metrics) is None


def test_it_asks_for_the_head_alone() -> None:
    assert ValueLoss().needs.head == "score" and not ValueLoss().needs.fields
