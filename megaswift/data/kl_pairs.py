"""Batches for KTO's KL term: each prompt with the completion of another sample.

    (x_1, y_1), ..., (x_n, y_n)  ->  (x_1, y_n), (x_2, y_1), ..., (x_n, y_{n-1})

Owns the rotation within a micro-batch, as TRL makes it of examples in their order. Pure: from batches to batches. A
completion begins with its first token that carries loss; all that follows belongs to it, with the labels it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megaswift.data.collate import Document, PaddingShape
from megaswift.data.encode_preferences import first_label
from megaswift.data.preference_batches import collate_preferences
from megaswift.losses.contract import Batch


def documents_of(batch: Batch) -> list[Document]:
    """The documents of a batch, rows or packed, with the tokens that carry loss."""
    if batch.cu_seqlens is None:
        spans = [(row, 0, batch.input_ids.shape[1]) for row in range(batch.input_ids.shape[0])]
    else:
        spans = [(0, a, b) for a, b in pairwise(batch.cu_seqlens.tolist())]
    documents: list[Document] = []
    for i, (row, a, b) in enumerate(spans):
        size = int(batch.valid[row, a:b].sum())
        mask = np.zeros(size, dtype=np.uint8)
        mask[1:] = batch.loss_weights[row, a : a + max(0, size - 1)].cpu().numpy() > 0
        ids = batch.input_ids[row, a : a + size].cpu().numpy().astype(np.int32)
        documents.append((ids, mask, -1 if batch.sample_ids is None else int(batch.sample_ids[i])))
    return documents


def kl_batches(batches: Sequence[Batch], shape: PaddingShape, max_length: int, uniform: bool = False) -> list[Batch]:
    """A step's micro-batches of examples with completions moved on by one, cut to `max_length` from the right;
    `examples` as they were.

    A document keeps the sample id of its prompt. One that is cut within its prompt is left without a label.
    """
    rotated: list[Sequence[Document | None]] = []
    for batch in batches:
        batch_documents = documents_of(batch)
        documents: list[Document | None] = [d if len(d[0]) else None for d in batch_documents]
        which = batch.fields["examples"].tolist()
        whole = [batch_documents[i] for i in which]
        begins = [first_label(mask) for _, mask, _ in whole]
        for n, i in enumerate(which):
            (prompt, _, number), (answer, mask, _) = whole[n], whole[n - 1]
            ids = np.concatenate([prompt[: begins[n]], answer[begins[n - 1] :]])[:max_length]
            loss = np.concatenate([np.zeros(begins[n], np.uint8), mask[begins[n - 1] :]])[:max_length]
            documents[i] = (ids, loss, number)
        rotated.append(documents)
    laid = collate_preferences(rotated, batches[0].cu_seqlens is not None, shape, uniform)
    return [replace(b, fields={"examples": batch.fields["examples"]}) for b, batch in zip(laid, batches, strict=True)]
