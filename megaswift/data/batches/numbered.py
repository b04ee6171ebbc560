"""Cuts global batches of numbered rows into ranks and micro-batches, and prepares them ahead.

What a row holds, and its tensors, belong to `NumberedRows`; a saved position to the sources built on this one
(`loader.py`, `indexed/batches.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.losses.contract import Batch


@dataclass(frozen=True)
class LoaderGeometry:
    """A rank's place among the data-parallel ranks, and how rows are padded."""

    dp_rank: int = 0
    dp_size: int = 1
    per_device: int = 1
    """Rows of a micro-batch."""
    accumulation: int = 1
    """Micro-batches a step on this rank."""
    doc_multiple: int = 1
    """2 x CP when CP > 1: each packed document is padded to it."""
    row_multiple: int = 1
    """Each row's length is a multiple of it (TP x CP and the like)."""
    uniform: bool = False
    """All micro-batches of a step have one length (pipelines)."""
    full_length: bool = False
    """All rows of training are padded to max_length (tensors of one shape)."""
    seed: int = 42
    vocabulary: int = 0
    """Rows of the model's embedding; 0: not known."""
    divided_weights: bool = False
    """Ranks hold parts of every weight, so all must go through a vision model's towers equally often."""

    @property
    def global_batch(self) -> int:
        """Rows a step over all ranks."""
        return self.dp_size * self.per_device * self.accumulation

    def own(self, rows: Sequence[Any] | np.ndarray) -> list[Any]:
        """This rank's micro-batches of a global batch: row (m x dp + rank) x per_device + i is row i of micro-batch
        m."""
        width = self.per_device * self.dp_size
        begin = self.dp_rank * self.per_device
        return [rows[m * width + begin : m * width + begin + self.per_device] for m in range(self.accumulation)]


class NumberedRows(Protocol):
    """Numbered rows that global batches are made of, whatever a row holds."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, row: int) -> Any:
        """What a row holds, never empty."""

    def batches(self, rows: Sequence[Sequence[Any]], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches. An empty row is one without weight."""


@dataclass
class NumberedRowsBatchSource:
    """Batches of numbered rows, endless and in a known order; several are prepared ahead."""

    data: NumberedRows
    geometry: LoaderGeometry
    shape: PaddingShape
    order: EpochOrder
    threads: int = 0
    """Prepare so many global batches ahead of the one that is taken, a thread each (0: none)."""
    prepare_ahead: Callable[[list[Batch]], list[Batch]] | None = None
    """What threads do to micro-batches beside."""
    alone: int = 0
    """Nothing is prepared ahead while so many of the next batches are trained on."""
    _taken: int = 0
    _ahead: deque[tuple[int, Future[list[Batch]]]] = field(default_factory=deque)
    _pool: ThreadPoolExecutor | None = None

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self.data)

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch."""
        return self.rows // self.geometry.global_batch

    def steps_for(self, epochs: float) -> int:
        """Steps that see each row `epochs` times, the last one running on into the next epoch where it must."""
        return max(1, int(np.ceil(epochs * self.rows / self.geometry.global_batch - 1e-9)))

    def steps_left(self, epochs: float) -> int:
        """The same from the present position on, however large the steps were that led there."""
        return max(0, int(np.ceil((epochs * self.rows - self._taken) / self.geometry.global_batch - 1e-9)))

    def _make(self, start: int) -> list[Batch]:
        places = range(start, start + self.geometry.global_batch)
        rows = [[self._row(place) for place in micro] for micro in self.geometry.own(places)]
        return self.data.batches(rows, self.shape, self.geometry.uniform)

    def _row(self, place: int) -> Any:
        """What the row at a place of the endless sequence holds."""
        return self.data.read(int(self.order.slice(place, place + 1)[0]))

    def _make_ahead(self, start: int) -> list[Batch]:
        batches = self._make(start)
        return batches if self.prepare_ahead is None else self.prepare_ahead(batches)

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""
        start = self._taken
        size = self.geometry.global_batch
        if self.threads == 0 or self.alone > 0:
            self.alone = max(0, self.alone - 1)
            batch = self._make(start)
        else:
            self._pool = self._pool or ThreadPoolExecutor(self.threads, thread_name_prefix="megaswift-data")
            nearest = self._ahead[-1][0] + size if self._ahead else start
            for position in range(nearest, start + (self.threads + 1) * size, size):
                first = max(position, 0)
                self.order.slice(first, first + size)  # here, so that threads only read the cached permutation
                self._ahead.append((position, self._pool.submit(self._make_ahead, position)))
            batch = self._ahead.popleft()[1].result()
        self._taken += size
        return batch

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._taken / self.rows
