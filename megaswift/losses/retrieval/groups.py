"""Groups of documents, such as a query with its positive and its negatives, and one vector or score for each document.

Owns how a document is pooled, as weights of its tokens, and where the documents of a group are:
`batch.fields["documents"]` int64 [groups, width], document numbers, and -1 where a group has no further document;
`batch.fields["values"]` float32 [groups, width], what the data say of each document (nan: nothing). Both have the same
shape on all data-parallel ranks; a filler is a group without documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.losses.document_segments import document_count, document_index, document_sums
from megaswift.losses.reward import weight_last_tokens_only


def _last(batch: Batch) -> Batch:
    return weight_last_tokens_only(batch)


def _cls(batch: Batch) -> Batch:
    return _with_weights(batch, batch.valid & (batch.positions == 0))


def _mean(batch: Batch) -> Batch:
    lengths = document_sums(batch, batch.valid.double()).clamp(min=1)
    return _with_weights(batch, batch.valid / lengths[document_index(batch)])


def _weighted_mean(batch: Batch) -> Batch:
    numbers = (batch.positions + 1) * batch.valid
    totals = document_sums(batch, numbers.double()).clamp(min=1)
    return _with_weights(batch, numbers / totals[document_index(batch)])


def _with_weights(batch: Batch, weights: Tensor) -> Batch:
    return replace(batch, loss_weights=weights.to(batch.loss_weights.dtype))


POOLING: Mapping[str, Callable[[Batch], Batch]] = {
    "last": _last,
    "mean": _mean,
    "cls": _cls,
    "weightedmean": _weighted_mean,
}
"""By the name of a pooling: the batch with loss weights of which `pool` makes it."""


def pool(vectors: Tensor, batch: Batch) -> Tensor:
    """Return the sum over each document of its vectors, by the loss weights of their tokens.

    Args:
        vectors: float32 [b, s, h].
        batch: Its loss weights are those that `POOLING` gives.

    Returns:
        float32 [documents, h]. Products of matrices, so that the order of additions does not change between two runs.
    """
    if batch.cu_seqlens is None:
        return torch.einsum("bs,bsh->bh", batch.loss_weights, vectors)
    numbers = torch.arange(document_count(batch), device=vectors.device)
    member = document_index(batch) == numbers[:, None]
    return (member * batch.loss_weights) @ vectors[0]


def by_group(batch: Batch, per_document: Tensor) -> Tensor:
    """Return values of documents [documents, ...] as [groups, width, ...]; 0 where there is no document."""
    places = batch.fields["documents"]
    taken = per_document[places.clamp(min=0)]
    return taken * present(batch).view(*places.shape, *(1,) * (taken.dim() - 2))


def present(batch: Batch) -> Tensor:
    """Return bool [groups, width]: where there is a document."""
    return batch.fields["documents"] >= 0


def group_count(batch: Batch) -> int:
    """Count the groups, without fillers."""
    return int(present(batch).any(1).sum())
