"""Loss weights of tokens (`--loss_scale`) in SFT and preference losses, beside sums written out token by token.

Covers: megaswift/losses/document_segments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.losses.cpo import CPO
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import DpoSettings
from megaswift.losses.kto import KTO
from megaswift.losses.sft import CrossEntropy
from tests.losses.bigram import Bigram, Doc, assert_same, batch, documents, pairs, reference_of, run
from tests.losses.trainers import differentiated

DOCS = documents([(3, 5), (3, 2), (1, 1), (1, 7), (6, 4), (6, 4)])
TOKENS = sum(len(d.ids) for d in DOCS)
BETA = 0.3


def weight_of(token: int) -> float:
    """Of a label, by its id: fractions, twos and ones, and 0 for some."""
    return (0.25, 1.0, 2.0, 1.0, 0.0)[token % 5]


def weighted(b: Batch) -> Batch:
    """The batch with the weights of its labels."""
    by_label = b.labels.clone().apply_(lambda token: weight_of(token) if token >= 0 else 0.0)
    scale = torch.tensor([weight_of(int(t)) for t in b.labels.flatten()]).view(by_label.shape)
    return replace(b, loss_weights=b.loss_weights * scale)


def steps(d: Doc) -> list[tuple[int, int, float]]:
    """(token before, label, weight) of each token of the answer."""
    return [(a, b, weight_of(b)) for a, b in zip(d.ids[d.begin - 1 :], d.ids[d.begin :], strict=False)]


def weighted_sum(logp: Tensor, d: Doc) -> Tensor:
    return torch.stack([w * logp[a, b] for a, b, w in steps(d)]).sum()


def total(d: Doc) -> float:
    return sum(w for _, _, w in steps(d)) or 1.0


def cross_entropy(logp: Tensor, docs: Sequence[Doc]) -> Tensor:
    return -torch.stack([weighted_sum(logp, d) for d in docs]).sum() / sum(w for d in docs for _, _, w in steps(d))


def log_sigmoid_loss(margins: Sequence[Tensor]) -> Tensor:
    return torch.log1p(torch.exp(-torch.stack(list(margins)))).mean()


def dpo(logp: Tensor, base: Tensor) -> Tensor:
    ratios = [weighted_sum(logp, d) - weighted_sum(base, d) for d in DOCS]
    margins = [BETA * (c - r) for c, r in zip(ratios[::2], ratios[1::2], strict=True)]
    return log_sigmoid_loss(margins) + 0.7 * cross_entropy(logp, DOCS[::2])


def ipo(logp: Tensor, base: Tensor) -> Tensor:
    means = [(weighted_sum(logp, d) - weighted_sum(base, d)) / total(d) for d in DOCS]
    return torch.stack([(c - r - 1 / (2 * BETA)) ** 2 for c, r in zip(means[::2], means[1::2], strict=True)]).mean()


def simpo(logp: Tensor, _: Tensor) -> Tensor:
    means = [weighted_sum(logp, d) / total(d) for d in DOCS]
    margins = [BETA * (c - r) - 0.5 for c, r in zip(means[::2], means[1::2], strict=True)]
    return log_sigmoid_loss(margins) + 0.4 * cross_entropy(logp, DOCS[::2])


def apo_zero(logp: Tensor, base: Tensor) -> Tensor:
    rewards = [BETA * (weighted_sum(logp, d) - weighted_sum(base, d)) for d in DOCS]
    return torch.stack([torch.sigmoid(-r if i % 2 == 0 else r) for i, r in enumerate(rewards)]).mean()


def examples(packed: bool) -> Batch:
    label = torch.arange(len(DOCS)) % 2 == 0
    return replace(batch(DOCS, packed), fields={"examples": torch.arange(len(DOCS)), "label": label})


CASES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor], Callable[[bool], Batch]]] = {
    "sft": (CrossEntropy(), lambda logp, _: cross_entropy(logp, DOCS), lambda packed: batch(DOCS, packed)),
    "dpo with sft": (DPO(settings=DpoSettings(BETA), rpo_alpha=0.7), dpo, lambda packed: pairs(DOCS, packed)),
    "ipo": (DPO(("ipo",), settings=DpoSettings(BETA)), ipo, lambda packed: pairs(DOCS, packed)),
    "simpo": (CPO("simpo", BETA, cpo_alpha=0.4), simpo, lambda packed: pairs(DOCS, packed)),
    "kto": (KTO("apo_zero_unpaired", BETA), apo_zero, examples),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_by_hand(case: str, packed: bool) -> None:
    loss, expected, make = CASES[case]
    model, base = Bigram(TOKENS, 1), Bigram(TOKENS, 2)
    b = reference_of(base, weighted(make(packed)))
    assert set(b.loss_weights.unique().tolist()) == {0.0, 0.25, 1.0, 2.0}
    value, gradient, _ = run(loss, model, [b])
    want = expected(model.weight.log_softmax(-1), base.weight.detach().log_softmax(-1))
    assert_same((value, gradient), differentiated(want, model.weight))
