"""Micro-batches of rows with labels.

Owns where a label goes: of a text into `fields["label"]`, with a loss weight at its last token; of tokens into
`Batch.labels`, each at its own token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.loader import DocumentRows, collate_step_microbatches
from megaswift.data.batches.token_types import batch_with_token_types
from megaswift.data.labeled.labels import LABEL
from megaswift.data.store.token_store import TokenStore
from megaswift.data.vision.batches import StreamedRowImages
from megaswift.losses.contract import Batch


class LabelLookup(Protocol):
    """Looks up the labels of texts."""

    @property
    def width(self) -> int:
        """Numbers of a label."""

    def label(self, sample: int) -> Sequence[float]:
        """Those of a sample."""


class StoredLabels:
    """The labels of the rows of token stores, numbered through all of them."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self._tables = [store.values for store in stores if store.values is not None]
        self._first = np.cumsum([0, *(len(table) for table in self._tables)])

    @property
    def width(self) -> int:
        """Numbers of a label."""
        return int(self._tables[0].shape[1])

    def label(self, sample: int) -> Sequence[float]:
        """Those of a sample."""
        k = int(np.searchsorted(self._first, sample, side="right")) - 1
        found: list[float] = self._tables[k][sample - int(self._first[k])].tolist()
        return found


@dataclass(frozen=True)
class StreamedLabels:
    """The labels of the rows of a stream that have been read and may still be trained on."""

    kept: StreamedRowImages
    """What the stream keeps of rows beside their tokens."""
    width: int

    def label(self, sample: int) -> Sequence[float]:
        """Those of a sample."""
        row = self.kept.row_images(sample)
        assert row is not None, f"row {sample} has been forgotten"
        found: Sequence[float] = row.beside[LABEL]
        return found


def fill_last_token(arrays: Mapping[str, np.ndarray], at: tuple[int, int], document: Document) -> None:
    """Lay a text into a batch's arrays, with a loss weight at its last token."""
    row, begin = at
    end = begin + len(document[0])
    arrays["input_ids"][row, begin:end] = document[0]
    arrays["valid"][row, begin:end] = True
    arrays["loss_weights"][row, end - 1] = 1


def fill_own_classes(arrays: Mapping[str, np.ndarray], at: tuple[int, int], document: Document) -> None:
    """Lay tokens into a batch's arrays, each with its own class, which the mask has plus 1."""
    row, begin = at
    ids, mask, _ = document
    end = begin + len(ids)
    arrays["input_ids"][row, begin:end] = ids
    arrays["valid"][row, begin:end] = True
    arrays["labels"][row, begin:end] = np.where(mask != 0, mask.astype(np.int64) - 1, 0)
    arrays["loss_weights"][row, begin:end] = mask != 0


def collate_labeled(
    rows: Sequence[Sequence[list[Document]]],
    packed: bool,
    shape: PaddingShape,
    uniform: bool,
    labels: LabelLookup | None,
) -> list[Batch]:
    """Tensors of a step's micro-batches. `labels`: those of texts; None: tokens have classes of their own."""
    if labels is None:
        return collate_step_microbatches(rows, packed, shape, uniform, fill_own_classes)
    batches = collate_step_microbatches(rows, packed, shape, uniform, fill_last_token)
    if not packed:
        laid = zip(rows, batches, strict=True)
        batches = [batch_with_token_types(batch, [r[0] if r else None for r in micro]) for micro, batch in laid]
    return [
        replace(batch, fields={LABEL: _labels_of_documents(micro, labels)})
        for micro, batch in zip(rows, batches, strict=True)
    ]


def _labels_of_documents(micro: Sequence[list[Document]], labels: LabelLookup) -> torch.Tensor:
    """float32 [documents, n], in the order of the documents; zeros for a row without any, which counts as one."""
    nothing = [0.0] * labels.width
    found: list[Sequence[float]] = []
    for row in micro:
        found += [labels.label(sample) for _, _, sample in row] or [nothing]
    return torch.tensor(found, dtype=torch.float32)


@dataclass
class LabeledRows(DocumentRows):
    """Numbered rows with labels, each one document or a pack of them."""

    labels: LabelLookup | None = None
    """Those of texts; None: tokens have classes of their own."""

    def batches(self, rows: Sequence[Sequence[list[Document]]], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        return collate_labeled(rows, self.shares_rows, shape, uniform, self.labels)
