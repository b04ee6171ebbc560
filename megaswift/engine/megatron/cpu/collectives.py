"""Collectives over gloo in one exchange, with the sizes that Megatron-Core needs.

gloo passes data round a ring: n - 1 steps, each of which wakes every rank. Where more ranks than cores share a machine
the waiting is all the time there is (8 ranks on 2 cores, 8 kB: reduce_scatter 124 ms, all_reduce 27 ms, all_to_all 8
ms), so gathers and sums travel by all_to_all here: as many bytes as the ring's, but for small all-reduces, where bytes
do not matter. On one machine, tensors that fit its slots go through shared memory instead. Sums are taken in the order
of ranks, so every rank has the same one, either way. All have ended when they return, `async_op` or not. Uneven parts,
which gloo does not support and the MoE dispatcher with ETP > 1 sends, work too. Parameters are named as torch's are:
some callers pass them by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.megatron.cpu import shared_memory
from megaswift.engine.megatron.cpu.cuda_stubs import CompletedWork
from megaswift.engine.megatron.cpu.shared_memory import SharedMemoryAllToAll

SMALL = 1 << 16
"""Elements up to which an all-reduce sends everything to everyone."""

_all_to_all_single = dist.all_to_all_single
_all_reduce = dist.all_reduce
_REDUCTIONS: dict[Any, Callable[[Tensor, int], Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


_exchanges: WeakKeyDictionary[Any, SharedMemoryAllToAll | None] = WeakKeyDictionary()


def _exchange(group: Any) -> SharedMemoryAllToAll | None:
    """The group's shared memory, made at its first use; None where gloo has to carry everything."""
    group = group if group is not None else dist.group.WORLD
    if group not in _exchanges:
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)

        def gather(numbers: list[int]) -> list[list[int]]:
            own_numbers = torch.tensor(numbers, dtype=torch.int64)
            all_numbers = own_numbers.new_empty(ranks, len(numbers))
            _all_to_all_single(all_numbers.view(-1), own_numbers.repeat(ranks), group=group)
            return all_numbers.tolist()

        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        _exchanges[group] = (
            shared_memory.open_shared_memory_all_to_all(rank, ranks, timeout, gather) if ranks > 1 else None
        )
    return _exchanges[group]


def _rows(sizes: Any, tensor: Tensor, ranks: int) -> list[int]:
    """Rows of the first dimension that go to, or come from, each rank; sizes may be a tensor."""
    if sizes is None:
        return [len(tensor) // ranks] * ranks
    return sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Split sizes as lists of ints, also where tensors are given."""
    ranks = dist.get_world_size(group)
    exchange = _exchange(group)
    sent = input.detach().contiguous()
    takes = _rows(output_split_sizes, output, ranks)
    gives = _rows(input_split_sizes, sent, ranks)
    width = math.prod(sent.shape[1:])
    parts = exchange(sent.view(-1), [n * width for n in gives]) if exchange is not None else None
    if parts is None:
        _all_to_all_single(output, sent, takes, gives, group)
    else:
        output.detach().copy_(
            torch.cat(
                [part[offset : offset + n * width] for (part, offset), n in zip(parts, takes, strict=True)]
            ).view_as(output)
        )
    return CompletedWork() if async_op else None


def _gathered(tensor: Tensor, counts: list[int], group: Any) -> Tensor:
    """All ranks' elements, `counts[rank]` of each, end to end."""
    flat = tensor.detach().reshape(-1)
    exchange = _exchange(group)
    if exchange is not None and (slots := exchange(flat, ())) is not None:
        return torch.cat([sent for sent, _ in slots])
    gathered = flat.new_empty(sum(counts))
    _all_to_all_single(gathered, flat.repeat(len(counts)), counts, [flat.numel()] * len(counts), group)
    return gathered


def _received(parts: Tensor, counts: list[int], group: Any) -> Tensor:
    """[ranks, elements]: what each rank holds of this rank's part; `parts` are all parts of `counts[rank]` elements end
    to end."""
    count = counts[dist.get_rank(group)]
    exchange = _exchange(group)
    if exchange is not None and (slots := exchange(parts, counts)) is not None:
        return torch.stack([sent[offset : offset + count] for sent, offset in slots])
    received = parts.new_empty(len(counts), count)
    _all_to_all_single(received.view(-1), parts, [count] * len(counts), counts, group)
    return received


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The ranks' tensors, whose first dimensions may differ."""
    counts = [output.numel() for output in tensor_list]
    for output, gathered in zip(tensor_list, _gathered(tensor, counts, group).split(counts), strict=True):
        output.copy_(gathered.view_as(output))
    return CompletedWork() if async_op else None


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """The ranks' tensors end to end; nothing is sent where the group is this rank alone."""
    ranks = dist.get_world_size(group)
    if ranks > 1:
        output_tensor.copy_(_gathered(input_tensor, [input_tensor.numel()] * ranks, group).view_as(output_tensor))
    elif output_tensor.data_ptr() != input_tensor.data_ptr():
        output_tensor.copy_(input_tensor.view_as(output_tensor))
    return CompletedWork() if async_op else None


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """The sum of this rank's part; the parts' first dimensions may differ."""
    parts = torch.cat([part.reshape(-1) for part in input_list])
    output.copy_(_REDUCTIONS[op](_received(parts, [part.numel() for part in input_list], group), 0).view_as(output))
    return CompletedWork() if async_op else None


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """The sum of this rank's part of equal ones; nothing is sent where the group is this rank alone."""
    ranks = dist.get_world_size(group)
    if ranks > 1:
        output.copy_(_REDUCTIONS[op](_received(input.reshape(-1), [output.numel()] * ranks, group), 0).view_as(output))
    elif output.data_ptr() != input.data_ptr():
        output.copy_(input.view_as(output))
    return CompletedWork() if async_op else None


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Small ones in one exchange, large ones in two (gloo's own between two ranks), others than sum, max and min by
    gloo."""
    ranks = dist.get_world_size(group)
    small = tensor.numel() <= SMALL
    if op not in _REDUCTIONS or (not small and ranks == 2):
        _all_reduce(tensor, op, group)
    elif ranks > 1:
        flat = tensor.detach().reshape(-1)
        count = tensor.numel()
        if small:
            total = _REDUCTIONS[op](_gathered(flat, [count] * ranks, group).view(ranks, count), 0)
        else:
            counts = [len(part) for part in flat.tensor_split(ranks)]
            total = _gathered(_REDUCTIONS[op](_received(flat, counts, group), 0), counts, group)
        tensor.detach().copy_(total.view_as(tensor))
    return CompletedWork() if async_op else None
