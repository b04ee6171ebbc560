"""Batches of groups whose documents are short, padded or packed, and losses on them over one or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.contract import Batch, ModelOutputs
from megaswift.losses.retrieval.groups import POOLING


@dataclass(frozen=True)
class RankBatch:
    """A micro-batch of one rank with random hidden states [b, s, h] in float64."""

    batch: Batch
    vectors: Tensor
    rows: list[Tensor]
    """The hidden states [n, h] of each document, as they are in `vectors`."""


def make(
    sizes: Sequence[int], values: Sequence[Sequence[float]] = (), seed: int = 0, packed: bool = False, h: int = 6
) -> RankBatch:
    """Groups of so many documents (0: a filler), pooled at the last token unless asked otherwise."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    lengths = [int(n) for n in torch.randint(1, 5, (count,), generator=generator)] or [1]
    width = max(max(sizes), 2)
    documents = torch.full((len(sizes), width), -1)
    given = torch.full((len(sizes), width), float("nan"))
    number = 0
    for i, size in enumerate(sizes):
        documents[i, :size] = torch.arange(number, number + size)
        number += size
        if i < len(values):
            given[i, : len(values[i])] = torch.tensor(values[i])
    rows = len(lengths)
    longest = max(lengths) + 1
    valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if not count:
        valid = torch.zeros_like(valid)
    positions = torch.arange(longest).repeat(rows, 1)
    vectors = torch.randn(rows, longest, h, generator=generator, dtype=torch.float64)
    edges = None
    if packed:
        edges = torch.arange(rows + 1, dtype=torch.int32) * longest
        valid, positions, vectors = valid.view(1, -1), positions.view(1, -1), vectors.view(1, -1, h)
    ids = torch.zeros_like(positions)
    weights = torch.zeros(positions.shape, dtype=torch.float64)
    batch = Batch(ids, ids, weights, positions, valid, edges, fields={"documents": documents, "values": given})
    vectors.requires_grad_()
    whole = vectors.view(rows, longest, h)
    return RankBatch(batch, vectors, [whole[i, :n] for i, n in enumerate(lengths)][:count])


def objective(loss: Any, made: Sequence[RankBatch], pooling: str = "last") -> tuple[Tensor, dict[str, float]]:
    """The objective of one micro-batch on each rank, as an engine makes it of them, and its metrics."""
    batches = [POOLING[pooling](rank.batch) for rank in made]
    outputs = [
        ModelOutputs(values=v[..., 0] if v.shape[-1] == 1 else None, vectors=v) for v in (r.vectors for r in made)
    ]
    if len(made) > 1:
        sent: list[list[Tensor]] = []
        for out, batch in zip(outputs, batches, strict=True):
            asked: list[Tensor] = []
            loss(replace(out, gather=_records(asked, len(made))), batch)
            sent.append(asked)
        outputs = [replace(out, gather=_answers(sent), rank=rank) for rank, out in enumerate(outputs)]
    counts: dict[str, float] = {}
    for batch in batches:
        for name, value in loss.counts(batch).items():
            counts[name] = counts.get(name, 0.0) + value
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, tuple[float, float]] = {}
    for out, batch in zip(outputs, batches, strict=True):
        terms, metrics = loss(out, batch)
        assert {t.name: t.denominator for t in terms} == loss.reported.terms
        assert set(metrics) == set(loss.reported.means)
        total = total + sum(t.weight * t.sum / max(counts[t.denominator], 1.0) for t in terms)
        for name, metric in metrics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + float(metric.sum), before[1] + float(metric.count)
    return total, {name: a / b for name, (a, b) in sums.items() if b}


def _records(asked: list[Tensor], ranks: int) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        asked.append(x)
        return torch.stack([x] * ranks)

    return gather


def _answers(sent: Sequence[Sequence[Tensor]]) -> Callable[[Tensor], Tensor]:
    calls = iter(range(1000))

    def gather(x: Tensor) -> Tensor:
        call = next(calls) % len(sent[0])
        return torch.stack([asked[call] for asked in sent])

    return gather
