"""Losses of rerankers against plain torch and sentence-transformers, and rankings against scikit-learn.

Covers: megaswift/losses/retrieval/ranking.py.
"""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.cross_encoder import losses as theirs
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaswift.losses.contract import TOKENS, RequestedModelOutputs
from megaswift.losses.retrieval.ranking import ndcg, ranks, reciprocal_rank
from megaswift.losses.retrieval.reranking import RerankerLoss
from tests.losses.retrieval.batches import RankBatch, make, objective

VALUES = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [1.0], [0.0, 0.0]]
SIZES = [len(v) for v in VALUES]


def made(h: int = 1) -> list[RankBatch]:
    """The groups of `VALUES`, two on each of two ranks, and a filler."""
    return [make([*SIZES[:2], 0], VALUES[:2], 5, h=h), make([*SIZES[2:], 0], VALUES[2:], 6, packed=True, h=h)]


def scores_of(batches: list[RankBatch]) -> list[Tensor]:
    """The scores of each group's documents."""
    flat = [rows[-1] for rank in batches for rows in rank.rows]
    scores = torch.stack([f[0] if len(f) == 1 else f[0] - f[1] for f in flat])
    return list(scores.split(SIZES))


def check(loss: RerankerLoss, batches: list[RankBatch], expected: Tensor) -> None:
    """Equal values and gradients."""
    value, _ = objective(loss, batches)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    leaves = [b.vectors for b in batches]
    for a, b in zip(*(torch.autograd.grad(x, leaves, allow_unused=True) for x in (value, expected)), strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("h", [1, 2])
def test_pointwise(h: int) -> None:
    batches = made(h)
    labels = torch.tensor([v for group in VALUES for v in group], dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(torch.cat(scores_of(batches)), labels)
    needs = RequestedModelOutputs(fields=frozenset(), head=TOKENS, tokens=(3, 5))
    check(RerankerLoss(needs=needs) if h == 2 else RerankerLoss(), batches, expected)


def test_listwise_compares_each_relevant_document_with_the_irrelevant_ones() -> None:
    batches = made()
    lists = []
    for scores, values in zip(scores_of(batches), VALUES, strict=True):
        others = [s for s, v in zip(scores, values, strict=True) if v == 0]
        lists += [
            torch.stack([s, *others]) / 0.5 for s, v in zip(scores, values, strict=True) if v == 1 and len(others)
        ]
    assert len(lists) == 3
    expected = torch.stack([F.cross_entropy(one, torch.tensor(0)) for one in lists]).mean()
    check(RerankerLoss("listwise_reranker", 0.5), batches, expected)


def test_listnet() -> None:
    batches = made()

    class Model(torch.nn.Module):
        """Returns scores as they are given."""

        num_labels = 1
        device = torch.device("cpu")

        def preprocess(self, pairs: list[tuple[Tensor, Tensor]], **_: object) -> dict[str, Tensor]:
            return {"x": torch.stack([document for _, document in pairs])}

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": features["x"]}

    reference = theirs.ListNetLoss(Model(), mini_batch_size=-1)
    scores = scores_of(batches)
    labels = [torch.tensor(v) for v in VALUES]
    expected = reference([[""] * 4, [list(s) for s in scores]], labels)
    value, _ = objective(RerankerLoss("listnet_reranker"), batches)
    torch.testing.assert_close(value.float(), expected, rtol=1e-5, atol=1e-6)  # they compute in float32


def test_metrics() -> None:
    batches = made()
    scores = [s.detach() for s in scores_of(batches)]
    _, metrics = objective(RerankerLoss(), batches)
    right = [(s > 0) == (v > 0.5) for group, values in zip(scores, VALUES, strict=True)
             for s, v in zip(group, values, strict=True)]  # fmt: skip
    assert metrics["accuracy"] == pytest.approx(sum(map(bool, right)) / len(right))
    assert metrics["ndcg"] == pytest.approx(
        sum(float(ndcg_score([VALUES[i]], [scores[i].tolist()])) for i in range(2)) / 2, abs=1e-6
    )
    first = [min(1 + int((scores[i] > scores[i][j]).sum()) for j, v in enumerate(VALUES[i]) if v) for i in range(2)]
    assert metrics["mrr"] == pytest.approx(sum(1 / place for place in first) / 2)


def test_graded_rankings_and_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 7, generator=generator)
    relevance = torch.randint(0, 4, (5, 7), generator=generator).float()
    there = torch.ones(5, 7, dtype=torch.bool)
    expected = [ndcg_score([r.tolist()], [s.tolist()]) for r, s in zip(relevance, scores, strict=True)]
    assert ndcg(ranks(scores, relevance, there), relevance).tolist() == pytest.approx(expected, abs=1e-6)
    equal = ranks(torch.zeros(1, 4), torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[True, True, True, False]]))
    assert equal.tolist()[0][:3] == [2, 1, 3]
    assert reciprocal_rank(equal, torch.tensor([[True, False, True, False]])).tolist() == [0.5]
