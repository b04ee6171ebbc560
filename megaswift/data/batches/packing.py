"""Packs documents into sequences by best-fit decreasing.

Owns the assignment only, in numpy. A document of length L goes to the fullest row that still has room for it. Rows with
the same room are alike, so documents of one length are placed in bulk: the work grows with the number of distinct
lengths and rooms, not with documents x log(rows). Attention and positions per document are `collate.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Which documents each row holds."""

    documents: np.ndarray
    """int64 [documents]: document numbers, row by row, in file order within a row."""
    offsets: np.ndarray
    """int64 [rows + 1]: where each row begins in `documents`."""
    capacity: int
    """Tokens a row has room for."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> np.ndarray:
        """Documents of row i."""
        return self.documents[self.offsets[i] : self.offsets[i + 1]]


class _Rows:
    """Open rows by the room they have left; the set of rooms in use is a bit set."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.by_room: dict[int, np.ndarray] = {}
        self.bits = 0
        self.count = 0

    def smallest_room(self, length: int) -> int | None:
        """The least room of an open row that is at least `length`."""
        above = self.bits >> length
        return length + (above & -above).bit_length() - 1 if above else None

    def pop(self, room: int, count: int) -> np.ndarray:
        """The `count` earliest rows with this room."""
        rows = self.by_room[room]
        taken = rows[:count]
        left = rows[count:]
        if len(left):
            self.by_room[room] = left
        else:
            del self.by_room[room]
            self.bits &= ~(1 << room)
        return taken

    def push(self, room: int, rows: np.ndarray) -> None:
        """Rows that now have this room."""
        if room > 0 and len(rows):
            self.by_room[room] = np.concatenate([self.by_room[room], rows]) if room in self.by_room else rows
            self.bits |= 1 << room

    def new(self, count: int) -> np.ndarray:
        """Fresh rows."""
        self.count += count
        return np.arange(self.count - count, self.count)


def pack_best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack documents of the given lengths, none above `capacity`, into rows."""
    assert len(lengths) and lengths.max() <= capacity and lengths.min() > 0
    order = np.argsort(-lengths, kind="stable")
    sizes, begins, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    rows = _Rows(capacity)
    row_of = np.empty(len(lengths), dtype=np.int64)
    for negative, begin, count in zip(sizes.tolist(), begins.tolist(), counts.tolist(), strict=True):
        length = -negative
        first = begin
        left = count
        while left:
            room = rows.smallest_room(length)
            each = (capacity if room is None else room) // length  # best fit fills the same row again while it has room
            wanted = max(1, left // each)
            each = min(each, left)
            taken = rows.new(wanted) if room is None else rows.pop(room, wanted)
            placed = each * len(taken)
            row_of[order[first : first + placed]] = np.repeat(taken, each)
            rows.push((capacity if room is None else room) - each * length, taken)
            first = first + placed
            left = left - placed
    return _in_file_order(row_of, capacity)


def _in_file_order(row_of: np.ndarray, capacity: int) -> Packing:
    """Rows in the order of their first documents, documents in file order."""
    documents = np.argsort(row_of, kind="stable")
    grouped = row_of[documents]
    begins = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
    ends = np.concatenate([begins[1:], [len(documents)]])
    order = np.argsort(documents[begins], kind="stable")
    sizes = (ends - begins)[order]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    which = np.repeat(begins[order] - offsets[:-1], sizes) + np.arange(len(documents))
    return Packing(documents[which], offsets, capacity)


def padded_lengths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple."""
    return -(-lengths // multiple) * multiple
