"""What evaluation measures of embeddings over the whole validation set: rankings of all its documents, or correlation
with labels. The same on any layout, because each text counts once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megaswift import distributed
from megaswift.engine.protocol import Engine
from megaswift.losses.contract import HIDDEN, Batch, RequestedModelOutputs
from megaswift.losses.document_segments import document_count
from megaswift.losses.retrieval.groups import by_group, pool
from megaswift.losses.retrieval.infonce import normalized
from megaswift.trainers.hooks.evaluation import EvaluationMeasure

NEEDS = RequestedModelOutputs(fields=frozenset(), head=HIDDEN)
CUTS = (1, 5, 10)
"""Places up to which recall is measured."""
LAST = 10
"""Places that the reciprocal rank and the gain look at."""
QUERIES = 256
"""Queries that are compared with all documents at a time."""


@dataclass
class EmbeddedGroups:
    """Groups as they were embedded: the digest of each text, its vector, and its value."""

    texts: list[list[bytes]] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)
    """float32 [documents, h] of each group."""
    values: list[np.ndarray] = field(default_factory=list)
    """float32 [documents] of each group."""

    def extend(self, other: EmbeddedGroups) -> None:
        """Add the groups of another rank."""
        self.texts += other.texts
        self.vectors += other.vectors
        self.values += other.values


class EmbeddingMeasure(EvaluationMeasure):
    """Embeds the validation set by a pass of its own, and compares its texts."""

    def __init__(self, ranks_documents: bool, speaks: bool) -> None:
        self.ranks_documents = ranks_documents
        """Whether queries rank documents; else pairs have labels."""
        self.speaks = speaks
        """Whether this rank is the one of its replica whose groups count."""
        self.groups = EmbeddedGroups()

    def begin(self) -> None:
        """Forget the last evaluation."""
        self.groups = EmbeddedGroups()

    def add(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Embed some micro-batches. Collective."""
        for batch, outputs in zip(batches, engine.score(batches, NEEDS), strict=True):
            if not self.speaks:
                continue
            vectors = outputs.vectors
            assert vectors is not None
            on_device = batch.to(vectors.device)
            embedded = normalized(by_group(on_device, pool(vectors, on_device))).cpu().numpy()
            texts = _digests(batch)
            values = batch.fields["values"].numpy()
            for i, places in enumerate(batch.fields["documents"].tolist()):
                count = sum(place >= 0 for place in places)
                if count:
                    self.groups.texts.append([texts[place] for place in places[:count]])
                    self.groups.vectors.append(embedded[i, :count])
                    self.groups.values.append(values[i, :count])

    def metrics(self) -> dict[str, float]:
        """Return the numbers of all ranks' groups, on every rank. Collective."""
        gathered = distributed.all_gather_merged_dict({distributed.global_rank(): self.groups} if self.speaks else {})
        every = EmbeddedGroups()
        for rank in sorted(gathered):
            every.extend(gathered[rank])
        self.groups = EmbeddedGroups()
        return ranking_metrics(every) if self.ranks_documents else correlation_metrics(every)


def _digests(batch: Batch) -> list[bytes]:
    """Return a digest of the tokens of each document of a batch in host memory."""
    length = batch.input_ids.shape[1]
    edges = [0, length] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    spans = [(0, a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    if batch.cu_seqlens is None:
        spans = [(row, 0, length) for row in range(document_count(batch))]
    found = []
    for row, a, b in spans:
        tokens = batch.input_ids[row, a:b][batch.valid[row, a:b]]
        found.append(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest())
    return found


def ranking_metrics(groups: EmbeddedGroups) -> dict[str, float]:
    """Rank all distinct documents for each distinct query, whose relevant documents are the positives of its rows.

    Recall is the share of the relevant documents among the first k, the reciprocal rank that of the first relevant one
    among the first ten, the gain is binary (`losses.retrieval.ranking.ndcg`). Of equal scores the irrelevant comes
    first.
    """
    queries: dict[bytes, np.ndarray] = {}
    documents: dict[bytes, np.ndarray] = {}
    relevant: dict[bytes, set[bytes]] = {}
    for texts, vectors in zip(groups.texts, groups.vectors, strict=True):
        queries.setdefault(texts[0], vectors[0])
        relevant.setdefault(texts[0], set()).add(texts[1])
        for text, vector in zip(texts[1:], vectors[1:], strict=True):
            documents.setdefault(text, vector)
    if not queries:
        return {}
    number = {text: i for i, text in enumerate(documents)}
    wanted = [torch.tensor(sorted(number[text] for text in relevant[query])) for query in queries]
    corpus = torch.from_numpy(np.stack(list(documents.values())))
    asked = torch.from_numpy(np.stack(list(queries.values())))
    sums: dict[str, float] = {}
    for start in range(0, len(asked), QUERIES):
        scores = asked[start : start + QUERIES] @ corpus.t()
        for row, places in zip(scores, wanted[start : start + QUERIES], strict=True):
            for name, value in _of_query(row, places).items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / len(asked) for name, value in sums.items()}


def _of_query(scores: Tensor, relevant: Tensor) -> Mapping[str, float]:
    """The numbers of one query: scores of all documents [d], numbers of the relevant ones [r]."""
    is_relevant = torch.zeros_like(scores, dtype=torch.bool)
    is_relevant[relevant] = True
    best = scores[relevant].sort(descending=True).values
    ahead = (scores[~is_relevant] >= best[:, None]).sum(1)
    places = ahead + torch.arange(1, len(best) + 1)
    within = places[places <= LAST].float()
    ideal = torch.arange(2, min(len(best), LAST) + 2).float()
    found = {f"recall@{k}": float((places <= k).float().mean()) for k in CUTS}
    found[f"mrr@{LAST}"] = 1 / float(within[0]) if len(within) else 0.0
    found[f"ndcg@{LAST}"] = float((1 / (within + 1).log2()).sum() / (1 / ideal.log2()).sum())
    return found


def correlation_metrics(groups: EmbeddedGroups) -> dict[str, float]:
    """Correlate the cosine of each pair with its label, as numbers (Pearson) and as ranks (Spearman); nothing where all
    labels are equal."""
    if not groups.vectors:
        return {}
    cosines = np.array([float(v[0] @ v[1]) for v in groups.vectors], dtype=np.float64)
    labels = np.array([float(v[1]) for v in groups.values], dtype=np.float64)
    if np.ptp(labels) == 0 or np.ptp(cosines) == 0:
        return {}
    return {
        "pearson_cosine": float(np.corrcoef(cosines, labels)[0, 1]),
        "spearman_cosine": float(np.corrcoef(_ranks(cosines), _ranks(labels))[0, 1]),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each number; equal ones share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = ((2 * ends - counts + 1) / 2)[inverse]
    return ranks
