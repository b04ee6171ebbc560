"""Order of rows over all epochs: a permutation per epoch, which may group rows of similar length; global batches may
span epoch boundaries. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MEGABATCH = 50
"""Batches that are sorted by length together, at most: transformers' `mega_batch_mult`."""


def group_by_length(order: np.ndarray, lengths: np.ndarray, batch: int) -> np.ndarray:
    """int64 [rows]: `order` cut into pieces of many batches, each sorted from the longest row to the shortest, with the
    longest row of all first, so that a lack of memory shows at once (transformers' `LengthGroupedSampler`)."""
    size = batch * max(1, min(len(order) // (batch * 4), MEGABATCH))
    pieces = [order[start : start + size] for start in range(0, len(order), size)]
    pieces = [piece[np.argsort(-lengths[piece], kind="stable")] for piece in pieces]
    longest = int(np.argmax([lengths[piece[0]] for piece in pieces]))
    first = pieces[0][0]
    other = pieces[longest][0]
    pieces[0][0] = other
    pieces[longest][0] = first
    return np.concatenate(pieces)


@dataclass
class EpochOrder:
    """The endless sequence of row numbers: epoch 0's rows, epoch 1's, ..."""

    rows: int
    shuffle: bool
    seed: int
    lengths: np.ndarray | None = None
    """int64 [rows]: with them, rows of similar length are grouped."""
    batch: int = 0
    """Rows of a global batch, for which they are grouped."""
    _cached: dict[int, np.ndarray] = field(default_factory=dict)

    def epoch(self, number: int) -> np.ndarray:
        """int64 [rows]: the order of epoch `number`."""
        if not self.shuffle:
            return np.arange(self.rows)
        if number not in self._cached:
            self._cached = {k: v for k, v in self._cached.items() if k >= number - 1}
            order = np.random.default_rng([self.seed, number]).permutation(self.rows)
            self._cached[number] = order if self.lengths is None else group_by_length(order, self.lengths, self.batch)
        return self._cached[number]

    def regroup(self, batch: int) -> None:
        """Groups for global batches of so many rows."""
        self.batch = batch
        self._cached = {}

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: the rows at these places of the endless sequence."""
        pieces = []
        while start < stop:
            number, offset = divmod(start, self.rows)
            end = min(self.rows, offset + stop - start)
            pieces.append(self.epoch(number)[offset:end] if self.shuffle else np.arange(offset, end))
            start += end - offset
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
