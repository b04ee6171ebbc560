"""Context parallelism: which tokens a rank holds, and how its results become whole sequences again.

Zigzag: a document is cut into 2 CP chunks, rank r holds chunks r and 2 CP - 1 - r, so that causal attention costs every
rank the same (Llama 3, arXiv:2407.21783, section 3.3.2). Each document of a packed row is cut by itself: cutting the
row as a whole is silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_positions(length: int, cp: int, rank: int, start: int = 0) -> Tensor:
    """int64 [length / cp]: positions of one document that `rank` holds, in its local order."""
    assert length % (2 * cp) == 0, f"a document of {length} tokens is not a multiple of {2 * cp}"
    chunk = length // (2 * cp)
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    last = torch.arange((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk)
    return torch.cat([first, last]) + start


def local_row_positions(length: int, cu_seqlens: Tensor | None, cp: int, rank: int) -> Tensor:
    """int64 [length / cp]: the positions of a row that `rank` holds. `cu_seqlens` int [documents + 1] when packed."""
    if cp == 1:
        return torch.arange(length)
    if cu_seqlens is None:
        return zigzag_positions(length, cp, rank)
    starts = cu_seqlens.tolist()
    return torch.cat([zigzag_positions(b - a, cp, rank, a) for a, b in zip(starts, starts[1:], strict=False)])


def gather_order(length: int, cu_seqlens: Tensor | None, cp: int) -> Tensor:
    """int64 [length]: where position p of the row lies in the concatenation of all ranks' slices."""
    joined = torch.cat([local_row_positions(length, cu_seqlens, cp, r) for r in range(cp)])
    return torch.argsort(joined)


class _Join(torch.autograd.Function):
    """All ranks' slices of the last dimension in sequence order; backward keeps the own slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=-1).index_select(-1, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(-1, index), None, None, None


def gather_sequence_for_loss(local: Tensor, order: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., s / cp] on each rank to [..., s] on all. Every rank then computes the same loss of whole sequences."""
    return _Join.apply(local, order, index, group)


class _GatherKV(torch.autograd.Function):
    """Keys or values of all ranks in sequence order (dim 0); backward sums every rank's gradient of the own slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=0).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, index), None, None, None


def gather_key_value_sequence(local: Tensor, order: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s / cp, ...] on each rank to [s, ...] on all, for keys and values."""
    return _GatherKV.apply(local, order, index, group)


class _AllToAll(torch.autograd.Function):
    """Block i of rank j becomes block j of rank i; backward does the same again."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None


def exchange_slices_for_heads(local: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's slice to all of the row for this rank's share of heads (DeepSpeed-Ulysses,
    arXiv:2309.14509). Collective.

    Args:
        local: [s / cp, b, heads, d].
        order: int64 [s], of `gather_order`.

    Returns:
        [s, b, heads / cp, d], in sequence order.
    """
    blocks = local.unflatten(2, (group.size(), -1)).movedim(2, 0).contiguous()
    return _AllToAll.apply(blocks, group).flatten(0, 1).index_select(0, order)


def exchange_heads_for_slices(whole: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse: [s, b, heads / cp, d] to [s / cp, b, heads, d]. Collective."""
    blocks = whole.index_select(0, torch.argsort(order)).unflatten(0, (group.size(), -1))
    return _AllToAll.apply(blocks, group).movedim(0, 2).flatten(2, 3)
