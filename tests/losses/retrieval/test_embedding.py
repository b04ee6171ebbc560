"""Losses of embeddings against sentence-transformers in float64: values, and gradients of hidden states, on one rank
and on two.

Covers: megaswift/losses/retrieval/groups.py, megaswift/losses/retrieval/infonce.py, megaswift/losses/retrieval/pairs.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer import losses as theirs
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from megaswift.losses.retrieval.embedding import EmbeddingLoss
from megaswift.losses.retrieval.infonce import InfonceSettings
from megaswift.losses.retrieval.pairs import PairSettings
from tests.losses.retrieval.batches import RankBatch, make, objective

CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
LABELS = [[float("nan"), label] for label in (1.0, 0.0, 1.0, 0.0, 1.0, 0.0)]


def columns(made: list[RankBatch], width: int, pooled: Any = lambda rows: rows[-1]) -> list[Tensor]:
    """The embeddings of all ranks' groups of `width` documents, a tensor for each place in a group."""
    vectors = [pooled(rows) for rank in made for rows in rank.rows]
    return [torch.stack(vectors[i::width]) for i in range(width)]


def check(ours: Tensor, reference: Tensor, made: list[RankBatch]) -> None:
    """Equal values, and equal gradients of every hidden state."""
    torch.testing.assert_close(ours, reference, **CLOSE)
    leaves = [rank.vectors for rank in made]
    for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (ours, reference)), strict=True):
        assert b.abs().max() > 1e-6
        torch.testing.assert_close(a, b, **CLOSE)


def ranks_of(ranks: int, width: int, values: bool = False, packed: bool = False) -> list[RankBatch]:
    """Three groups a rank."""
    return [
        make([width] * 3, [LABELS[(rank * 3 + i) % 6] for i in range(3)] if values else (), rank, packed)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("width", "directions"), [(2, ALL[:1]), (4, ALL[:1]), (4, ALL), (3, ("query_to_doc", ALL[2]))])
def test_infonce(width: int, directions: Any, ranks: int) -> None:
    made = ranks_of(ranks, width, packed=width == 4)
    reference = theirs.MultipleNegativesRankingLoss(None, scale=1 / 0.05, directions=directions)
    loss = EmbeddingLoss(infonce=InfonceSettings(0.05, infonce_directions=directions))
    value, metrics = objective(loss, made)
    check(value, reference.compute_loss_from_embeddings(columns(made, width), None), made)
    query, positive, *_ = (F.normalize(c, dim=1) for c in columns(made, width))
    assert metrics["mean_pos"] == pytest.approx(float((query * positive).sum(1).mean()))
    best = (query @ torch.cat([F.normalize(c, dim=1) for c in columns(made, width)[1:]]).t()).argmax(1)
    assert metrics["accuracy"] == pytest.approx(float((best == torch.arange(len(query))).double().mean()))


def test_own_negatives_alone() -> None:
    made = [make([4, 3, 2], seed=3)]
    vectors = [F.normalize(rows[-1], dim=0) for rows in made[0].rows]
    expected = torch.zeros((), dtype=torch.float64)
    for first, size in ((0, 4), (4, 3), (7, 2)):
        scores = torch.stack([vectors[first] @ v for v in vectors[first + 1 : first + size]]) / 0.1
        expected = expected - scores.log_softmax(0)[0] / 3
    check(objective(EmbeddingLoss(infonce=InfonceSettings(infonce_use_batch=False)), made)[0], expected, made)


def test_groups_of_unequal_size_and_fillers_on_two_ranks() -> None:
    made = [make([4, 2, 3]), make([2, 4, 0], seed=1)]
    vectors = [F.normalize(rows[-1], dim=0) for rank in made for rows in rank.rows]
    starts = [(0, 4), (4, 2), (6, 3), (9, 2), (11, 4)]
    documents = [v for first, size in starts for v in vectors[first + 1 : first + size]]
    own = [sum(size - 1 for _, size in starts[:i]) for i in range(5)]
    scores = torch.stack([torch.stack([vectors[first] @ v for v in documents]) for first, _ in starts]) / 0.1
    check(objective(EmbeddingLoss(), made)[0], F.cross_entropy(scores, torch.tensor(own)), made)
    nothing, _ = objective(EmbeddingLoss(), [make([0, 0]), make([0, 0], seed=1)])
    assert nothing == 0 and torch.isfinite(nothing)


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_documents_that_are_closer_than_the_positive_are_left_out(margin: float) -> None:
    made = ranks_of(2, 4)
    settings = InfonceSettings(0.1, infonce_directions=ALL[:2], infonce_false_negative_margin=margin)
    query, *documents = (F.normalize(c, dim=1) for c in columns(made, 4))
    scores = torch.cat([query @ torch.cat(documents).t(), query @ query.t() - 1e9 * torch.eye(6)], dim=1)
    positive = scores.diagonal()[:, None].detach()
    masked = scores.masked_fill(scores > positive + margin + 1e-12, -1e9)
    assert 0 < int((masked < scores).sum()) < masked.numel() - 6
    check(objective(EmbeddingLoss(infonce=settings), made)[0], F.cross_entropy(masked / 0.1, torch.arange(6)), made)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("cosine_similarity", theirs.CosineSimilarityLoss(None)),
        ("contrastive", theirs.ContrastiveLoss(None, margin=0.8)),
        ("online_contrastive", theirs.OnlineContrastiveLoss(None, margin=0.8)),
        ("cosent", theirs.CoSENTLoss(None)),
    ],
)
def test_pairs(name: str, reference: Any, ranks: int) -> None:
    made = ranks_of(ranks, 2, values=True)
    labels = torch.tensor([LABELS[i % 6][1] for i in range(3 * ranks)], dtype=torch.float64)
    if name in ("cosine_similarity", "cosent"):
        labels = labels * 0.7 + 0.1 * torch.arange(3 * ranks)
        for rank, one in enumerate(made):
            one.batch.fields["values"][:, 1] = labels[rank * 3 : rank * 3 + 3]
    value, _ = objective(EmbeddingLoss(name, pairs=PairSettings(contrastive_margin=0.8)), made)
    expected = reference.compute_loss_from_embeddings(columns(made, 2), labels)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8)  # they round labels to float32
    for a, b in zip(
        *(torch.autograd.grad(x, [m.vectors for m in made]) for x in (value, expected.double())), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_online_contrastive_with_one_kind_of_label(label: float) -> None:
    made = [make([2, 2, 2], [[0.0, label]] * 3)]
    expected = theirs.OnlineContrastiveLoss(None).compute_loss_from_embeddings(
        columns(made, 2), torch.full((3,), label)
    )
    torch.testing.assert_close(objective(EmbeddingLoss("online_contrastive"), made)[0], expected, **CLOSE)


def test_matryoshka() -> None:
    made = ranks_of(2, 3)

    class Model(torch.nn.Module):
        """Returns the embeddings of a column."""

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": features["x"]}

        def get_embedding_dimension(self) -> int:
            return 6

    model: Any = Model()
    inner = theirs.MultipleNegativesRankingLoss(model, scale=10.0)
    reference = theirs.MatryoshkaLoss(model, inner, [2, 6, 4], [0.5, 1.0, 2.0])
    expected = reference([{"x": c} for c in columns(made, 3)], None)
    loss = EmbeddingLoss(matryoshka_dims=(2, 6, 4), matryoshka_weights=(0.5, 1.0, 2.0))
    check(objective(loss, made)[0], expected, made)


POOLED: dict[str, Any] = {
    "last": lambda rows: rows[-1],
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(0),
    "weightedmean": lambda rows: (rows * torch.arange(1, len(rows) + 1)[:, None]).sum(0) / sum(range(len(rows) + 1)),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pooling", POOLED)
def test_pooling(pooling: str, packed: bool) -> None:
    made = [make([3, 2], packed=packed)]
    vectors = [F.normalize(POOLED[pooling](rows), dim=0) for rows in made[0].rows]
    documents = torch.stack([vectors[1], vectors[2], vectors[4]])
    scores = torch.stack([vectors[0], vectors[3]]) @ documents.t() / 0.1
    check(objective(EmbeddingLoss(), made, pooling)[0], F.cross_entropy(scores, torch.tensor([0, 2])), made)
