"""The losses of rerankers: one score for each document of a query, read at its last token.

A classifier's head with one label gives the score, or a language model as the difference of two tokens' logits (yes
and no).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import (
    SCORES,
    Batch,
    LossTerm,
    MeanMetric,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)
from megaswift.losses.retrieval.groups import by_group, group_count, pool, present
from megaswift.losses.retrieval.infonce import MASKED
from megaswift.losses.retrieval.ranking import ndcg, ranks, reciprocal_rank


@dataclass(frozen=True)
class Candidates:
    """The documents of each query."""

    scores: Tensor
    """float32 [queries, documents]."""
    relevance: Tensor
    """float32 [queries, documents], 0 where there is no document."""
    there: Tensor
    """bool [queries, documents]."""

    @property
    def relevant(self) -> Tensor:
        """bool [queries, documents]."""
        return self.there & (self.relevance > 0.5)

    @property
    def irrelevant(self) -> Tensor:
        """bool [queries, documents]."""
        return self.there & (self.relevance <= 0.5)


def _pointwise(candidates: Candidates, temperature: float) -> Tensor:
    """Binary cross-entropy of each document."""
    losses = F.binary_cross_entropy_with_logits(candidates.scores, candidates.relevance, reduction="none")
    return (losses * candidates.there).sum()


def _listwise(candidates: Candidates, temperature: float) -> Tensor:
    """Cross-entropy of each relevant document against the query's irrelevant ones; queries that lack either have
    none."""
    scores = candidates.scores / temperature
    others = scores.masked_fill(~candidates.irrelevant, MASKED).logsumexp(1, keepdim=True)
    losses = torch.logaddexp(scores, others) - scores
    return (losses * _listed(candidates)).sum()


def _listed(candidates: Candidates) -> Tensor:
    """bool [queries, documents]: relevant documents of queries with irrelevant ones."""
    return candidates.relevant & candidates.irrelevant.any(1, keepdim=True)


def _listnet(candidates: Candidates, temperature: float) -> Tensor:
    """Cross-entropy of the softmax of scores and that of relevance (Cao et al. 2007, ListNet's top-1 form)."""
    scores = (candidates.scores / temperature).masked_fill(~candidates.there, MASKED)
    targets = candidates.relevance.masked_fill(~candidates.there, MASKED).softmax(1)
    losses = -(targets * scores.log_softmax(1) * candidates.there).sum(1)
    return (losses * candidates.there.any(1)).sum()


RERANKER_LOSSES: Mapping[str, tuple[Callable[[Candidates, float], Tensor], str]] = {
    "pointwise_reranker": (_pointwise, "documents"),
    "listwise_reranker": (_listwise, "lists"),
    "listnet_reranker": (_listnet, "rows"),
}
"""The formula, and the count by which its sum is divided."""


@dataclass(frozen=True)
class RerankerLoss:
    """A loss on the scores of a query's documents."""

    loss_type: str = "pointwise_reranker"
    temperature: float = 1.0
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head=SCORES)

    @property
    def reported(self) -> Reported:
        """The term, how often a document is judged right, and the rankings of queries that have both kinds."""
        counts = ("rows", "documents", "lists")
        return Reported(counts, {"loss": RERANKER_LOSSES[self.loss_type][1]}, ("accuracy", "mrr", "ndcg"))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of `rows`, of their `documents`, and of `lists`: relevant documents with others to compare
        them with."""
        candidates = _candidates(torch.zeros_like(batch.fields["values"]), batch)
        lists = float(_listed(candidates).sum())
        return {"rows": float(group_count(batch)), "documents": float(candidates.there.sum()), "lists": lists}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The term and the metrics."""
        assert outputs.vectors is not None
        heads = outputs.vectors
        scores = heads if heads.shape[-1] == 1 else heads[..., :1] - heads[..., 1:]
        candidates = _candidates(by_group(batch, pool(scores, batch))[..., 0], batch)
        formula, count = RERANKER_LOSSES[self.loss_type]
        return [LossTerm("loss", formula(candidates, self.temperature), count)], self._metrics(candidates)

    def _metrics(self, candidates: Candidates) -> dict[str, Metric]:
        scores = candidates.scores.detach()
        right = ((scores > 0) == candidates.relevant) & candidates.there
        judged = candidates.relevant.any(1) & candidates.irrelevant.any(1)
        places = ranks(scores, candidates.relevance, candidates.there)
        first = reciprocal_rank(places, candidates.relevant)
        gain = ndcg(places, candidates.relevance.clamp(min=0))
        return {
            "accuracy": MeanMetric(right.sum(), candidates.there.sum()),
            "mrr": MeanMetric((first * judged).sum(), judged.sum()),
            "ndcg": MeanMetric((gain * judged).sum(), judged.sum()),
        }


def _candidates(scores: Tensor, batch: Batch) -> Candidates:
    there = present(batch)
    return Candidates(scores, batch.fields["values"].nan_to_num().to(scores.dtype) * there, there)
