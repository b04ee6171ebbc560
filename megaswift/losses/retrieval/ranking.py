"""Metrics of rankings: where the relevant documents of a query come when its documents are sorted by score."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(scores: Tensor, relevance: Tensor, there: Tensor) -> Tensor:
    """Return the place of each document among those of its query, from 1.

    Of equal scores the less relevant document comes first, so that scores that are all equal gain nothing.

    Args:
        scores: [queries, documents].
        relevance: [queries, documents].
        there: bool [queries, documents]: False where a query has no such document.

    Returns:
        int64 [queries, documents], meaningless where there is no document.
    """
    # [queries, documents, others]: which others come before the document
    number = torch.arange(scores.shape[1], device=scores.device)
    higher = scores[:, None, :] > scores[:, :, None]
    equal = scores[:, None, :] == scores[:, :, None]
    less_relevant = relevance[:, None, :] < relevance[:, :, None]
    earlier = (relevance[:, None, :] == relevance[:, :, None]) & (number < number[:, None])
    before = higher | (equal & (less_relevant | earlier))
    return 1 + (before & there[:, None, :]).sum(2)


def reciprocal_rank(places: Tensor, relevant: Tensor) -> Tensor:
    """Return 1 / the place of the first relevant document, [queries]; 0 where there is none.

    Args:
        places: int64 [queries, documents], from `ranks`.
        relevant: bool [queries, documents]: documents that are there and relevant.
    """
    return torch.where(relevant, 1.0 / places, 0.0).amax(1)


def ndcg(places: Tensor, relevance: Tensor) -> Tensor:
    """Return the sum of relevance / log2(place + 1) over its largest possible value, [queries] (Jarvelin and Kekalainen
    2002); 0 where nothing is relevant.

    Args:
        places: int64 [queries, documents], from `ranks`.
        relevance: [queries, documents], not below 0, 0 where there is no document.
    """
    gained = (relevance / (places + 1.0).log2()).sum(1)
    ideal = torch.arange(2, relevance.shape[1] + 2, device=relevance.device).float().log2()
    best = (relevance.sort(1, descending=True).values / ideal).sum(1)
    return torch.where(best > 0, gained / best.clamp(min=1e-30), 0.0)
