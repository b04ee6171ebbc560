"""InfoNCE: the query's own positive against other documents, by cosine similarity (arXiv:1807.03748, equation 4;
sentence-transformers has it as its loss of multiple negatives)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import MeanMetric, Metric

MASKED = -1e30
"""A score that adds nothing to a sum of exponentials: finite, so that a row of nothing else has finite gradients."""


@dataclass(frozen=True)
class InfonceSettings:
    """The options of the loss; the names are those of options."""

    infonce_temperature: float = 0.1
    infonce_use_batch: bool = True
    infonce_directions: tuple[str, ...] = ("query_to_doc",)
    infonce_false_negative_margin: float | None = None


@dataclass(frozen=True)
class GatheredGroups:
    """Groups of all data-parallel ranks: vectors of length 1, and where there is a document."""

    vectors: Tensor
    """float32 [ranks, groups, width, h]: the query, its positive, its negatives."""
    present: Tensor
    """bool [ranks, groups, width]."""
    rank: int
    """The rank whose queries the loss is of."""


def infonce(groups: GatheredGroups, settings: InfonceSettings) -> tuple[Tensor, dict[str, Metric]]:
    """Return the sum over the rank's own queries of the loss, and metrics of their similarities.

    Without documents of other queries (`infonce_use_batch`) a query has its own positive and negatives alone.
    """
    ranks, count, width, _ = groups.vectors.shape
    places = torch.arange(count, device=groups.vectors.device)
    queries = groups.vectors[groups.rank, :, 0]
    positives = groups.vectors[groups.rank, :, 1]
    valid = groups.present[groups.rank, :, 0]

    # Similarities of the own queries [q] with all documents [ranks x groups x (width - 1)]; own groups by number
    own = groups.rank * count + places
    documents = groups.vectors[:, :, 1:].flatten(0, 2)
    group_of = torch.arange(ranks * count, device=own.device).repeat_interleave(width - 1)
    same_group = own[:, None] == group_of
    there = groups.present[:, :, 1:].flatten().expand(count, -1)
    similarity = queries @ documents.t()
    positive = (queries * positives).sum(1)
    is_positive = torch.arange(len(documents), device=own.device) == own[:, None] * (width - 1)
    counted = there if settings.infonce_use_batch else there & same_group

    # Further directions, whose entries join the same sum of exponentials
    everyone = groups.vectors[:, :, 0].flatten(0, 1)
    asked = groups.present[:, :, 0].flatten().expand(count, -1)
    itself = own[:, None] == torch.arange(len(everyone), device=own.device)
    blocks = [(similarity, counted)]
    if "query_to_query" in settings.infonce_directions:
        blocks.append((queries @ everyone.t(), asked & ~itself))
    margin = settings.infonce_false_negative_margin
    if margin is not None:  # what is closer to the query than its positive by more than this may be one itself
        limit = positive.detach()[:, None] + margin
        blocks = [(scores, some & (scores.detach() <= limit)) for scores, some in blocks]
        blocks[0] = (similarity, blocks[0][1] | is_positive)
    if "doc_to_query" in settings.infonce_directions:
        blocks.append((positives @ everyone.t(), asked))
    if "doc_to_doc" in settings.infonce_directions:
        blocks.append((positives @ documents.t(), there & ~same_group))

    scores = torch.cat([torch.where(some, block / settings.infonce_temperature, MASKED) for block, some in blocks], 1)
    losses = scores.logsumexp(1) - positive / settings.infonce_temperature
    total = torch.where(valid, losses, 0.0).sum()
    negative = counted & ~is_positive & valid[:, None]
    return total, _metrics(positive.detach(), similarity.detach(), negative)


def _metrics(positive: Tensor, similarity: Tensor, negative: Tensor) -> dict[str, Metric]:
    """Means over queries with any negative, and over negatives; [q], and [q, documents]."""
    judged = negative.any(1)
    hardest = similarity.masked_fill(~negative, MASKED).amax(1)
    return {
        "mean_pos": MeanMetric((positive * judged).sum(), judged.sum()),
        "mean_neg": MeanMetric((similarity * negative).sum(), negative.sum()),
        "margin": MeanMetric(torch.where(judged, positive - hardest, 0.0).sum(), judged.sum()),
        "accuracy": MeanMetric(((positive > hardest) & judged).float().sum(), judged.sum()),
    }


def normalized(vectors: Tensor) -> Tensor:
    """Return the vectors [..., h] with length 1; zeros stay zeros."""
    return F.normalize(vectors, dim=-1)
