"""Rank 0's tensors on every rank: for those who take a stream of weights on more ranks than the one that writes
files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NamedTensor = tuple[str, Tensor]


def broadcast_tensors(items: Iterable[_NamedTensor]) -> list[_NamedTensor]:
    """Rank 0's `items`, tensors of the CPU, on every rank; the others' own are dropped. Collective over all ranks."""
    held = [(name, tensor.contiguous()) for name, tensor in items]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return held
    box: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in held]]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() != 0:
        held = [(name, torch.empty(shape, dtype=dtype)) for name, shape, dtype in box[0]]
    for _, tensor in held:
        dist.broadcast(tensor, src=0)
    return held
