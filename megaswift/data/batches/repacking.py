"""Repacks the remaining documents of an epoch when a run is resumed with another packing. Pure numpy.

Packing depends on the layout: with context parallelism each document is padded. When a run goes on with other padding,
rows are other rows, and a position in the old ones says nothing about the new. So the old rows are packed again, which
is deterministic, the documents of those already taken are left out, and the others are packed for the layout of now.
The next epoch has the rows of now. `PackingSpan` is one such change; an epoch may have several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.batches.packing import Packing, pack_best_fit, padded_lengths


@dataclass(frozen=True)
class PackingParameters:
    """What packing depends on beside the documents' lengths; capacity 0: not packed, each document is a row."""

    multiple: int = 1
    """Each document is padded to it."""
    capacity: int = 0
    """Tokens of a row."""

    def pack(self, lengths: np.ndarray) -> Packing:
        """Documents of these lengths in rows."""
        if self.capacity:
            return pack_best_fit(padded_lengths(lengths, self.multiple), self.capacity)
        return Packing(np.arange(len(lengths)), np.arange(len(lengths) + 1), 0)


@dataclass(frozen=True)
class PackingSpan:
    """The rows that an epoch's documents had for a while, and how many of them were taken."""

    shape: PackingParameters
    taken: int


@dataclass(frozen=True)
class RemainingRows:
    """The rows that an epoch still has."""

    epoch: int
    stages: tuple[PackingSpan, ...]
    """Before now."""
    packing: Packing
    """The packing of the documents that no stage took; it holds numbers among all documents."""
    order: np.ndarray
    """int64 [rows]: in which they come."""

    def __len__(self) -> int:
        return len(self.order)

    def documents(self, place: int) -> np.ndarray:
        """The documents of the row at a place in the order."""
        return self.packing.row(int(self.order[place]))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"epoch": self.epoch, "stages": [asdict(stage) for stage in self.stages]}


def packing_spans_from_state(state: Mapping[str, Any]) -> tuple[PackingSpan, ...]:
    """The inverse of `RemainingRows.state`."""
    return tuple(PackingSpan(PackingParameters(**one["shape"]), int(one["taken"])) for one in state["stages"])


def remaining_rows(
    lengths: np.ndarray, stages: Sequence[PackingSpan], now: PackingParameters, epoch: int, order: EpochOrder
) -> RemainingRows:
    """What `stages` left of an epoch, in rows of now."""
    left = np.arange(len(lengths))
    for number, stage in enumerate(stages):
        packing = stage.shape.pack(lengths[left])
        taken = _order(len(packing), order, epoch, number)[: stage.taken]
        gone = np.concatenate([packing.row(int(row)) for row in taken]) if len(taken) else np.zeros(0, dtype=np.int64)
        left = np.delete(left, gone)
        if not len(left):
            break
    if not len(left):
        return RemainingRows(epoch, tuple(stages), Packing(left, np.zeros(1, dtype=np.int64), now.capacity), left)
    packing = now.pack(lengths[left])
    remaining = Packing(left[packing.documents], packing.offsets, packing.capacity)
    return RemainingRows(epoch, tuple(stages), remaining, _order(len(remaining), order, epoch, len(stages)))


def _order(rows: int, like: EpochOrder, epoch: int, stage: int) -> np.ndarray:
    """int64 [rows]: the first stage has the order of an ordinary epoch."""
    if stage == 0:
        return EpochOrder(rows, like.shuffle, like.seed).epoch(epoch)
    if not like.shuffle:
        return np.arange(rows)
    return np.random.default_rng([like.seed, epoch, stage]).permutation(rows)
