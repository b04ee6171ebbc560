"""The documents of a batch, packed or not, and sums over each: rows of an unpacked batch, segments of a packed one.

Owns the numbering: document i is row i, or the segment from `cu_seqlens[i]` on. Which documents belong together (pairs,
examples) says the batch's `fields`. Documents lie one after the other in the flattened batch, so one way serves both.
The conversations of an agent's session are documents that count as one: `fields["owner"]`, int64 [documents], names for
each document the one in whose place it counts, a neighbour before it or itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaswift.losses.contract import Batch


def document_count(batch: Batch) -> int:
    """Return the number of documents, those without weight included."""
    return batch.input_ids.shape[0] if batch.cu_seqlens is None else batch.cu_seqlens.numel() - 1


def document_index(batch: Batch) -> Tensor:
    """Return int64 [b, s]: the number of each token's document, or of its `owner`; padding belongs to the document
    before it."""
    index = _index(batch)
    return batch.fields["owner"][index] if "owner" in batch.fields else index


def _index(batch: Batch) -> Tensor:
    rows, length = batch.input_ids.shape
    if batch.cu_seqlens is None:
        return torch.arange(rows, device=batch.input_ids.device).unsqueeze(1).expand(rows, length)
    edges = batch.cu_seqlens.to(batch.input_ids.device)
    positions = torch.arange(length, dtype=edges.dtype, device=edges.device)
    return (torch.searchsorted(edges[1:-1].contiguous(), positions, right=True)).unsqueeze(0)


def document_sums(batch: Batch, x: Tensor) -> Tensor:
    """Sum x [b, s] over each document, to [documents] in x's type; differentiable.

    Added up in float64: log-probabilities of long answers are sums of thousands of terms of which small differences
    count, and the order in which a GPU adds them then leaves no trace in float32.
    """
    sums = torch.zeros(document_count(batch), dtype=torch.float64, device=x.device)
    return sums.index_add(0, document_index(batch).flatten(), x.flatten().double()).to(x.dtype)


def masked_tokens_per_document(batch: Batch, mask: Tensor) -> Tensor:
    """Count each document's tokens in `mask` (bool [b, s]): int64 [documents]."""
    return document_sums(batch, mask.double()).long()


def masked_token_number_in_document(batch: Batch, mask: Tensor) -> Tensor:
    """Return int64 [b, s]: the running number, from 1, of a masked token among the masked tokens of its document;
    meaningless elsewhere."""
    counts = masked_tokens_per_document(batch, mask)
    before = counts.cumsum(0) - counts
    return mask.flatten().cumsum(0).view_as(mask) - before[document_index(batch)]


def token_mask_of_documents(batch: Batch, documents: Tensor, marked: Tensor | None = None) -> Tensor:
    """Mark the tokens, bool [b, s], of those `documents` (int64 [n], each once) that are `marked` (bool [n])."""
    member = torch.zeros(document_count(batch), dtype=torch.bool, device=documents.device)
    marked = torch.ones_like(documents, dtype=torch.bool) if marked is None else marked
    return member.scatter(0, documents, marked)[document_index(batch)]


def completion_weights(batch: Batch) -> Tensor:
    """Return float32 [b, s]: the loss weights of the answers' tokens: `fields["completion"]`, else of every label."""
    return batch.fields.get("completion", batch.loss_weights)


def completion_mask(batch: Batch) -> Tensor:
    """Return bool [b, s]: positions whose label is a token of the answer."""
    return completion_weights(batch) != 0


def completion_weight_per_document(batch: Batch) -> Tensor:
    """Sum `completion_weights` over each document, to [documents]; 1 where the sum is 0. Means over an answer are
    divided by it."""
    weights = document_sums(batch, completion_weights(batch))
    return weights.masked_fill(weights == 0, 1)
