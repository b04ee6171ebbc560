"""A sharded checkpoint (torch_dist), read region by region whatever layout it was saved on.

Owns finding the saved boxes that a region needs and reading no more than these, with memory for the region alone.
`read_torch_dist_metadata` reads and checks the tables; `sharded_state_dict_entries` maps keys to parameters.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megaswift.bridge.checkpoint import metadata, tensor_file
from megaswift.bridge.file_tensor import FileTensor, OpenFileReader, empty_releasable_tensor
from megaswift.errors import CheckpointError, Problem


@dataclass(frozen=True)
class _Saved:
    """One box."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Boxes:
    """All boxes of a tensor, in order of their first rows."""

    boxes: list[_Saved]
    starts: list[int]
    longest: int
    """Rows of the tallest box."""

    def near(self, first: int, end: int) -> list[_Saved]:
        """Those whose rows may meet [first, end)."""
        return self.boxes[
            bisect.bisect_left(self.starts, first - self.longest + 1) : bisect.bisect_left(self.starts, end)
        ]


class TorchDistSource:
    """The tensors of one folder. Opening it reads the tables only and checks that every file is there in full."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        index = metadata.read_torch_dist_metadata(self.directory)
        problems = (
            [index] if isinstance(index, Problem) else metadata.missing_or_short_file_problems(self.directory, index)
        )
        if problems:
            raise CheckpointError(problems)
        assert isinstance(index, Metadata)
        self.files = OpenFileReader()
        self._storage: dict[MetadataIndex, Any] = index.storage_data
        self._tables = {k: v for k, v in index.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._boxes: dict[str, _Boxes] = {}
        self._items: dict[tuple[str, _Saved], FileTensor] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes that were taken."""
        return self.files.bytes_read

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tables)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tables[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tables[key].properties.dtype

    def file(self, key: str) -> Path:
        """Return the first file that holds a part of a tensor."""
        return self.directory / self._storage[MetadataIndex(key, self._tables[key].chunks[0].offsets)].relative_path

    def missing(self, key: str) -> int:
        """Count the elements of a tensor that no box holds; boxes of one tensor never overlap."""
        return math.prod(self.shape(key)) - sum(math.prod(chunk.sizes) for chunk in self._tables[key].chunks)

    def parts_along(self, key: str, dim: int) -> int:
        """Count the parts into which a tensor was cut along a dimension."""
        return len({chunk.offsets[dim] for chunk in self._tables[key].chunks})

    def region(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the part of `shape` at `offset` of a tensor, in its stored dtype."""
        out = empty_releasable_tensor(shape, self.dtype(key))
        self.fill(key, offset, out)
        return out

    def fill(self, key: str, offset: Sequence[int], out: Tensor) -> None:
        """Read the part at `offset` of a tensor into `out`, which has its shape and the stored dtype."""
        filled = 0
        shape = tuple(out.shape)
        rows = (offset[0], offset[0] + shape[0]) if shape else (0, 1)
        for box in self._of(key).near(*rows):
            low = [max(a, b) for a, b in zip(offset, box.offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, box.offset, box.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            target = out
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dim, a - offset[dim], b - a)
            self._fill(key, box, [a - b for a, b in zip(low, box.offset, strict=True)], target)
            filled += target.numel()
        if filled != out.numel():
            raise CheckpointError(
                Problem(f"{self.file(key)}, tensor {key}", f"is incomplete: the part at {list(offset)} is missing")
            )

    def _of(self, key: str) -> _Boxes:
        if key not in self._boxes:
            chunks = sorted(
                (_Saved(tuple(c.offsets), tuple(c.sizes)) for c in self._tables[key].chunks), key=lambda b: b.offset
            )
            longest = max((b.shape[0] for b in chunks if b.shape), default=1)
            self._boxes[key] = _Boxes(chunks, [b.offset[0] if b.offset else 0 for b in chunks], longest)
        return self._boxes[key]

    def _fill(self, key: str, box: _Saved, corner: Sequence[int], target: Tensor) -> None:
        info = self._storage[MetadataIndex(key, torch.Size(box.offset))]
        path = self.directory / info.relative_path
        try:
            if (key, box) not in self._items:
                if info.transform_descriptors:
                    raise ValueError(f"is transformed ({', '.join(info.transform_descriptors)})")
                record = tensor_file.locate_torch_save_tensor(path, info.offset, info.length)
                if record.shape != box.shape or record.dtype != target.dtype:
                    raise ValueError(
                        f"has {list(record.shape)} {record.dtype}, but .metadata has {list(box.shape)} {target.dtype}"
                    )
                self._items[key, box] = record
            self.files.fill(self._items[key, box], corner, target)
        except (OSError, ValueError) as error:
            raise CheckpointError(Problem(f"{path}, tensor {key}", f"cannot be read: {error}")) from None

    def close(self) -> None:
        """Close the files."""
        self.files.close()
