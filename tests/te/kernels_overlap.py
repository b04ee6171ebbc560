"""User buffers of overlapped tensor-parallel communication: the same exchanges, before or after a product instead of
beside it.

Owns the buffers' objects and what a product with `comm_overlap` exchanges. Streams, chunks and the order of chunks are
not covered, and neither are products whose communication another product hides (`external`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.te.registry import ENUMERATIONS, stand_in_class

GATHER, SCATTER = ENUMERATIONS["CommOverlapType"]["AG"], ENUMERATIONS["CommOverlapType"]["RS"]


@stand_in_class
class CommOverlapHelper:
    """The groups that the buffers' owners were made with: all ranks, and the tensor-parallel ones."""

    def __init__(self, world: Any, tensor_parallel: Any = None) -> None:
        self.group = tensor_parallel or world


@stand_in_class
class CommOverlap:
    """A buffer of [rows, width] that the tensor-parallel ranks share."""

    def __init__(
        self, shape: list[int], dtype: torch.dtype, helper: CommOverlapHelper, tp_size: int, *_: Any, **options: Any
    ) -> None:
        self.group, self.options = helper.group, options
        assert dist.get_world_size(self.group) == tp_size
        self.rank, self.ranks = dist.get_rank(self.group), tp_size
        self.buffer = torch.zeros(math.prod(shape), dtype=dtype)
        self.shape = list(shape)
        self.exchanges = 0

    def is_fp8_ubuf(self) -> bool:
        """Whether it holds FP8 values."""
        return self.buffer.dtype == torch.uint8

    def with_cublasmp(self) -> bool:
        """Whether another library computes and exchanges."""
        return bool(self.options.get("use_cublasmp"))

    def chunk(self) -> Tensor:
        """This rank's part, flat."""
        return self.buffer.chunk(self.ranks)[self.rank]

    def copy_into_buffer(self, tensor: Tensor, local_chunk: bool = False) -> None:
        """Fills the buffer or this rank's part: exactly."""
        target = self.chunk() if local_chunk else self.buffer
        assert tensor.numel() == target.numel(), f"{tuple(tensor.shape)} does not fill a buffer of {self.shape}"
        target.copy_(tensor.reshape(-1))

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Tensor:
        """The buffer or this rank's part, as a view."""
        source = self.chunk() if local_chunk else self.buffer
        if shape is None:
            shape = [self.shape[0] // (self.ranks if local_chunk else 1), *self.shape[1:]]
        assert math.prod(shape) == source.numel(), f"{tuple(shape)} is not a buffer of {self.shape}"
        return source.view(*shape)

    def gather(self) -> None:
        """All ranks' parts into each rank's buffer."""
        self.exchanges += 1
        dist.all_gather_into_tensor(self.buffer, self.chunk().clone(), group=self.group)

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over ranks, flat."""
        self.exchanges += 1
        part = whole.new_empty(whole.numel() // self.ranks)
        dist.reduce_scatter_tensor(part, whole.reshape(-1), group=self.group)
        return part


@stand_in_class
class CommOverlapP2P(CommOverlap):
    """The same by a ring of messages."""


def before_product(overlap: CommOverlap | None, kind: Any) -> None:
    """What is gathered: the operand that lies in the buffer, or with `bulk_overlap` what a later product takes."""
    if overlap is not None and kind == GATHER:
        overlap.gather()


def after_product(overlap: CommOverlap | None, kind: Any, product: Tensor, extra: Tensor | None, bulk: bool) -> None:
    """What is scattered: the product, into `extra`, or with `bulk_overlap` the buffer, into this rank's part of it."""
    if overlap is None or kind != SCATTER:
        return
    if not bulk:
        assert extra is not None
        assert not overlap.is_fp8_ubuf(), "the test device has no product in FP8 that is scattered"
        extra.copy_(overlap.scatter(product.to(overlap.buffer.dtype)).view(extra.shape))
        return
    assert extra is None or not extra.numel(), "the test device has no FP8 buffer whose sum another product hides"
    overlap.chunk().copy_(overlap.scatter(overlap.buffer))
