"""Losses on the cosine similarity of two texts with a label, as in sentence-transformers.

Each function returns the sum over this rank's own pairs. Those that look at all pairs of a batch take the similarities
of all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.retrieval.infonce import MASKED


@dataclass(frozen=True)
class PairSettings:
    """The options of these losses; the names are those of options."""

    contrastive_margin: float = 0.5
    cosent_scale: float = 20.0


@dataclass(frozen=True)
class LabeledPairs:
    """The pairs of all data-parallel ranks."""

    similarity: Tensor
    """float32 [ranks, pairs]: cosines."""
    labels: Tensor
    """float32 [ranks, pairs]."""
    present: Tensor
    """bool [ranks, pairs]: False for fillers."""
    rank: int
    """The rank whose part of the loss is asked for."""

    @property
    def own(self) -> tuple[Tensor, Tensor, Tensor]:
        """Similarity, label and presence of this rank's pairs, [pairs] each."""
        return self.similarity[self.rank], self.labels[self.rank], self.present[self.rank]


def cosine_similarity(pairs: LabeledPairs, settings: PairSettings) -> Tensor:
    """(similarity - label)^2."""
    similarity, labels, there = pairs.own
    return ((similarity - labels).square() * there).sum()


def contrastive(pairs: LabeledPairs, settings: PairSettings) -> Tensor:
    """Half of d^2 for a label of 1, of max(0, margin - d)^2 for 0, with the distance d = 1 - similarity (Hadsell,
    Chopra and LeCun 2006, equation 4)."""
    similarity, labels, there = pairs.own
    distance = 1 - similarity
    apart = F.relu(settings.contrastive_margin - distance)
    return (0.5 * (labels * distance.square() + (1 - labels) * apart.square()) * there).sum()


def online_contrastive(pairs: LabeledPairs, settings: PairSettings) -> Tensor:
    """d^2 of positives that are farther apart than the closest negative, and max(0, margin - d)^2 of negatives that are
    closer than the farthest positive. A sum over the pairs of the batch, which is multiplied by their number, because
    the engine divides by it."""
    distances = 1 - pairs.similarity.detach()
    is_positive = pairs.present & (pairs.labels == 1)
    is_negative = pairs.present & (pairs.labels == 0)
    # Of labels that the batch lacks the other ones' mean takes the place
    farthest = torch.where(
        is_positive.any(), distances.masked_fill(~is_positive, MASKED).amax(), _mean(distances, is_negative)
    )
    closest = torch.where(
        is_negative.any(), distances.masked_fill(~is_negative, -MASKED).amin(), _mean(distances, is_positive)
    )
    distance = 1 - pairs.similarity[pairs.rank]
    hard_positive = is_positive[pairs.rank] & (distance.detach() > closest)
    hard_negative = is_negative[pairs.rank] & (distance.detach() < farthest)
    apart = F.relu(settings.contrastive_margin - distance)
    total = (distance.square() * hard_positive).sum() + (apart.square() * hard_negative).sum()
    return total * pairs.present.sum()


def _mean(values: Tensor, some: Tensor) -> Tensor:
    return (values * some).sum() / some.sum().clamp(min=1)


def cosent(pairs: LabeledPairs, settings: PairSettings) -> Tensor:
    """log(1 + sum of exp(scale (s_j - s_i))) over all two pairs i, j of the batch with label_i > label_j (CoSENT). A
    number for the batch, of which each rank returns its share, multiplied by the number of pairs, because the engine
    divides by it."""
    scores = (pairs.similarity * settings.cosent_scale).flatten()
    labels = pairs.labels.flatten()
    there = pairs.present.flatten()
    lower = (labels[:, None] < labels) & there[:, None] & there  # [j, i]
    differences = torch.where(lower, scores[:, None] - scores, MASKED).flatten()
    total = torch.cat([differences.new_zeros(1), differences]).logsumexp(0)
    return total * there.sum() / len(pairs.similarity)


PAIR_LOSSES: Mapping[str, Callable[[LabeledPairs, PairSettings], Tensor]] = {
    "cosine_similarity": cosine_similarity,
    "contrastive": contrastive,
    "online_contrastive": online_contrastive,
    "cosent": cosent,
}
OVER_ALL_RANKS = ("online_contrastive", "cosent")
"""Those that look at the pairs of all ranks."""
