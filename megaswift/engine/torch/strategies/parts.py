"""Joins the equal parts of tensors that ranks hold: many tensors at a time, in one buffer for each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.engine.buckets import aligned
from megaswift.engine.protocol import Receivers


class Part(NamedTuple):
    """A rank's part of a tensor, which is cut into parts of one size for the ranks of a group, in their order."""

    values: Tensor
    """Flat. The last parts may be shorter, or empty."""
    size: int
    """Elements of a part."""
    shape: Sequence[int]
    """The whole tensor's."""


def is_receiver(to: Receivers) -> bool:
    """Return whether this rank gets tensors: each rank is a replica."""
    return to != "rank0" or distributed.global_rank() == 0


def joined(parts: Sequence[Part], group: Any, device: torch.device, to: Receivers) -> Iterator[Tensor]:
    """Yield the whole tensors on receivers, nothing on other ranks. Collective over the group.

    Args:
        parts: This rank's, of tensors in the same order on every rank.
        group: The ranks that hold the other parts.
        device: That of the group's communication.
        to: The ranks that get tensors, of all groups.
    """
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + aligned(part.size * part.values.element_size()))
    own = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    for part, start in zip(parts, ends, strict=False):
        count = part.values.numel()
        own[start : start + count * part.values.element_size()].view(part.values.dtype).copy_(part.values)
    rows = own.new_empty(group.size() if is_receiver(to) else 0, len(own))
    if to != "rank0":
        dist.all_gather_into_tensor(rows.view(-1), own, group=group)
    elif 0 in dist.get_process_group_ranks(group):
        dist.gather(own, list(rows) or None, dst=0, group=group)
    for part, start in zip(parts, ends, strict=False) if len(rows) else ():
        size = part.size * part.values.element_size()
        flat = rows[:, start : start + size].view(part.values.dtype).contiguous().flatten()
        yield flat[: math.prod(part.shape)].view(torch.Size(part.shape))
