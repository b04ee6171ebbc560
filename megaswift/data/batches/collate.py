"""Collates documents into the tensors of one micro-batch: padding, shifted labels, positions and document
boundaries.

Owns the shapes of `losses.contract.Batch`. Which documents come together belongs to `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch

from megaswift.losses.contract import Batch

Document = tuple[np.ndarray, np.ndarray, int]
"""(int32 tokens [n], loss weights [n], sample id)."""


@dataclass(frozen=True)
class PaddingShape:
    """How rows are padded."""

    doc_multiple: int = 1
    """Packed documents are padded to a multiple of this."""
    row_multiple: int = 1
    """Rows are padded to a multiple of this."""
    pad_id: int = 0
    minimum: int = 0
    """Tokens that every row is padded to at least."""

    def row_length(self, tokens: int) -> int:
        """The length of a row for so many tokens: the next multiple."""
        unit = lcm(self.doc_multiple, self.row_multiple)
        return -(-max(tokens, self.minimum, 1) // unit) * unit

    def packed_length(self, row: Sequence[Document]) -> int:
        """The length of a packed row: its documents, each padded, and the row's own padding."""
        return self.row_length(sum(-(-len(d[0]) // self.doc_multiple) * self.doc_multiple for d in row))


Fill = Callable[[dict[str, np.ndarray], tuple[int, int], Document], None]
"""Lays a document into a batch's arrays: (arrays, (row, first column), document)."""


def fill_next_tokens(arrays: dict[str, np.ndarray], at: tuple[int, int], document: Document) -> None:
    """Lay a document into a batch's arrays; the label of each token is the next one."""
    row, begin = at
    ids, mask, _ = document
    end = begin + len(ids)
    arrays["input_ids"][row, begin:end] = ids
    arrays["labels"][row, begin : end - 1] = ids[1:]
    arrays["loss_weights"][row, begin : end - 1] = mask[1:]
    arrays["valid"][row, begin:end] = True


def empty_arrays(rows: int, length: int, pad_id: int) -> dict[str, np.ndarray]:
    """A batch's arrays [rows, length] without a token."""
    return {
        "input_ids": np.full((rows, length), pad_id, dtype=np.int64),
        "labels": np.full((rows, length), pad_id, dtype=np.int64),
        "loss_weights": np.zeros((rows, length), dtype=np.float32),
        "positions": np.tile(np.arange(length), (rows, 1)),
        "valid": np.zeros((rows, length), dtype=bool),
    }


def batch_of_arrays(arrays: dict[str, np.ndarray], sample_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Batch:
    """The batch of `empty_arrays` that have been filled."""
    t = {k: torch.from_numpy(v) for k, v in arrays.items()}
    return Batch(t["input_ids"], t["labels"], t["loss_weights"], t["positions"], t["valid"], cu_seqlens, sample_ids)


def collate_rows(
    documents: Sequence[Document | None], shape: PaddingShape, length: int, fill: Fill = fill_next_tokens
) -> Batch:
    """`[b, length]`: one document a row, padded on the right; None is a row without weight."""
    arrays = empty_arrays(len(documents), length, shape.pad_id)
    for i, document in enumerate(documents):
        if document is not None:
            fill(arrays, (i, 0), document)
    ids = torch.tensor([-1 if d is None else d[2] for d in documents])
    return batch_of_arrays(arrays, ids, None)


def collate_packed(
    rows: Sequence[Sequence[Document]], shape: PaddingShape, lengths: Sequence[int], fill: Fill = fill_next_tokens
) -> Batch:
    """`[1, sum(lengths)]`: packed rows one after the other; `cu_seqlens` holds the padded documents' starts and the
    end.

    A row's own padding belongs to its last document; attention is causal, so nothing sees it. An empty row is one
    document without weight.
    """
    arrays = empty_arrays(1, sum(lengths), shape.pad_id)
    starts = []
    ids = []
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        position = begin
        for document in row:
            fill(arrays, (0, position), document)
            starts.append(position)
            ids.append(document[2])
            position += -(-len(document[0]) // shape.doc_multiple) * shape.doc_multiple
        if not row:
            starts.append(begin)
            ids.append(-1)
        begin += length
    return packed_batch(arrays, starts, ids)


def packed_batch(arrays: dict[str, np.ndarray], starts: Sequence[int], ids: Sequence[int]) -> Batch:
    """The batch of filled arrays [1, tokens] whose documents begin at `starts`; positions begin anew with each."""
    length = arrays["input_ids"].shape[1]
    edges = np.array([*starts, length], dtype=np.int32)
    arrays["positions"][0] = np.arange(length) - np.repeat(edges[:-1], np.diff(edges))
    return batch_of_arrays(arrays, torch.tensor(ids), torch.from_numpy(edges))
