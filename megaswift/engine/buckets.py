"""Sizes of the buckets in which tensors are gathered from ranks, and how tensors fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

DEVICE_BUCKET = 1 << 29
"""Bytes of whole tensors that are gathered together on a GPU; a larger tensor is gathered alone."""
HOST_BUCKET = 1 << 26
"""The same in host memory."""
ALIGNMENT = 16
"""Bytes; of every tensor in a buffer, a multiple of every dtype's size."""


def bucket_size(device: torch.device) -> int:
    """Return the bytes of a bucket whose tensors lie on this device."""
    return HOST_BUCKET if device.type == "cpu" else DEVICE_BUCKET


def aligned(size: int) -> int:
    """Round a number of bytes up to where the next tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def filled(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items that have at most `limit` bytes together; a larger item alone."""
    held: list[T] = []
    size = 0
    for item in items:
        more = nbytes(item)
        if held and size + more > limit:
            yield held
            held = []
            size = 0
        held.append(item)
        size += more
    if held:
        yield held
