"""Order of rows over all epochs: a permutation per epoch; global batches may span epoch boundaries. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class EpochOrder:
    """The endless sequence of row numbers: epoch 0's rows, epoch 1's, ..."""

    rows: int
    shuffle: bool
    seed: int
    _cached: dict[int, np.ndarray] = field(default_factory=dict)

    def epoch(self, number: int) -> np.ndarray:
        """int64 [rows]: the order of epoch `number`."""
        if not self.shuffle:
            return np.arange(self.rows)
        if number not in self._cached:
            self._cached = {k: v for k, v in self._cached.items() if k >= number - 1}
            self._cached[number] = np.random.default_rng([self.seed, number]).permutation(self.rows)
        return self._cached[number]

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: the rows at these places of the endless sequence."""
        pieces = []
        while start < stop:
            number, offset = divmod(start, self.rows)
            end = min(self.rows, offset + stop - start)
            pieces.append(self.epoch(number)[offset:end] if self.shuffle else np.arange(offset, end))
            start += end - offset
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
