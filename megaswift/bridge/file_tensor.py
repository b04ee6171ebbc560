"""Tensors that lie as plain row-major bytes in a file, read part by part.

Owns reading with `pread` into memory of the caller's: a mapped page would count as this process's memory until the file
is unmapped, and a converter may not grow with the model. Parts that are no runs of bytes (columns) are copied out of a
mapping that lives no longer than the copy; `mapped_tensor` is for tensors of which a caller wants one part and then
another. What the bytes mean (safetensors, torch_dist) belongs to the sources.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

READ = 1 << 28
"""Bytes a read call takes at most (Linux stops at 2 GiB)."""
MAPPED = 1 << 20
"""Bytes from which a block has pages of its own."""


@dataclass(frozen=True)
class FileTensor:
    """Where a contiguous tensor lies."""

    file: Path
    offset: int
    """The position of its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def bytes_view(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def empty_releasable_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Create an empty tensor; a large one's memory goes back to the system with it.

    malloc keeps what was freed, and finds no use for it when the next block is to be aligned: reading a model block by
    block grew a process by 130 to 180 MiB in place of two blocks of 16.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MAPPED:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: small pages cost time, not memory
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def _mapping(descriptor: int, dtype: torch.dtype, first: int, stop: int) -> Tensor:
    """Bytes [first, stop) of a file as a vector: a mapping that ends with it."""
    page = first - first % mmap.ALLOCATIONGRANULARITY
    if os.fstat(descriptor).st_size < stop:
        raise OSError(f"ends before byte {stop}")
    # torch warns of memory it may not write to
    access = {
        "prot": mmap.PROT_READ | mmap.PROT_WRITE,
        "flags": mmap.MAP_PRIVATE,
    }
    pages = mmap.mmap(descriptor, stop - page, offset=page, **access)
    return torch.frombuffer(pages, dtype=dtype, count=(stop - first) // dtype.itemsize, offset=first - page)


def mapped_tensor(stored: FileTensor) -> Tensor:
    """Map a stored tensor without reading it yet, over a mapping that ends with it and with all views of it."""
    count = math.prod(stored.shape)
    if not count:
        return torch.empty(stored.shape, dtype=stored.dtype)
    with stored.file.open("rb") as file:
        flat = _mapping(file.fileno(), stored.dtype, stored.offset, stored.offset + count * stored.dtype.itemsize)
    return flat.view(stored.shape)


class OpenFileReader:
    """Descriptors of files that are read again and again; `bytes_read` counts what was taken."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """Return the descriptor of a file, which is opened on first use."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def bytes_into(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill `target`; an OSError when the file is shorter."""
        filled = 0
        descriptor = self.descriptor(path)
        while filled < len(target):
            count = os.preadv(descriptor, [target[filled : filled + READ]], offset + filled)
            if not count:
                raise OSError(f"ends at byte {offset + filled}, {len(target) - filled} bytes early")
            filled += count
        self.bytes_read += filled

    def fill(self, stored: FileTensor, corner: Sequence[int], out: Tensor) -> None:
        """Copy the region of `out`'s shape at `corner` of the stored tensor into `out`, which has its dtype."""
        shape = stored.shape
        extent = tuple(out.shape)
        if not out.numel():
            return
        runs = all(n == whole for n, whole in zip(extent[1:], shape[1:], strict=True))
        width = stored.dtype.itemsize
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if runs and out.is_contiguous():
            self.bytes_into(
                stored.file, stored.offset + (corner[0] * strides[0] if shape else 0) * width, bytes_view(out)
            )
            return
        last = [c + n - 1 for c, n in zip(corner, extent, strict=True)]
        first, end = (
            stored.offset + width * sum(i * s for i, s in zip(index, strides, strict=True)) for index in (corner, last)
        )
        out.copy_(_mapping(self.descriptor(stored.file), stored.dtype, first, end + width).as_strided(extent, strides))
        self.bytes_read += out.numel() * width

    def region(self, stored: FileTensor, corner: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Read a part of a stored tensor into memory of its own."""
        out = empty_releasable_tensor(extent, stored.dtype)
        self.fill(stored, corner, out)
        return out

    def close(self) -> None:
        """Close all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
