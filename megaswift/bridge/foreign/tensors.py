"""The tensors of another program's checkpoint under the keys of a weight plan, read region by region.

Owns putting a region together from the stored tensors that hold it, with memory for the region alone. Where they lie
is said by `keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.checkpoint.hf_view import StoredTensors
from megaswift.bridge.file_tensor import empty_releasable_tensor
from megaswift.bridge.foreign.keys import Part


class PlacedTensors:
    """`StoredTensors` of parameters whose parts lie in other tensors."""

    def __init__(self, stored: StoredTensors, parts: Mapping[str, tuple[Part, ...]]) -> None:
        self.stored = stored
        self.parts = parts
        self.directory = stored.directory

    @property
    def bytes_read(self) -> int:
        """Bytes that were taken."""
        return self.stored.bytes_read

    def keys(self) -> list[str]:
        """Return the keys of all parameters."""
        return list(self.parts)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a parameter: where the last of its parts end."""
        parts = self.parts[key]
        return tuple(max(p.corner[dim] + p.shape[dim] for p in parts) for dim in range(len(parts[0].shape)))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a parameter."""
        return self.stored.dtype(self.parts[key][0].key)

    def file(self, key: str) -> Path:
        """Return the first file that holds a part of a parameter."""
        return self.stored.file(self.parts[key][0].key)

    def missing(self, key: str) -> int:
        """Count the elements that no file holds, of all tensors that the parameter is made of."""
        return sum(self.stored.missing(name) for name in {part.key for part in self.parts[key]})

    def region(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the part of `shape` at `offset` of a parameter."""
        out = empty_releasable_tensor(shape, self.dtype(key))
        self.fill(key, offset, out)
        return out

    def fill(self, key: str, offset: Sequence[int], out: Tensor) -> None:
        """Read the part at `offset` of a parameter into `out`."""
        filled = 0
        for part in self.parts[key]:
            low = [max(a, b) for a, b in zip(offset, part.corner, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, out.shape, part.corner, part.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            target = out
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dim, a - offset[dim], b - a)
            filled += target.numel()
            within = [a - b for a, b in zip(low, part.corner, strict=True)][part.dropped :]
            start = part.start or (0,) * len(within)
            corner = [*part.at, *(a + b for a, b in zip(start, within, strict=True))]
            target = target[(0,) * part.dropped][(None,) * len(part.at)]
            self.stored.fill(part.key, corner, target)
        assert filled == out.numel(), f"{key}: {filled} of {out.numel()} elements at {list(offset)} have a place"

    def close(self) -> None:
        """Close the files."""
        self.stored.close()
