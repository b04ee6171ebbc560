"""Packed rows under context parallelism: each document's halves, corrections of outputs and gradients, the exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.te.registry import kernel, python_function

CONTEXT = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel:"


@python_function(CONTEXT + "flash_attn_p2p_communicate")
def flash_attn_p2p_communicate(
    rank: int, send: Tensor, destination: int, receive: Tensor, source: int, group: Any, batched: bool
) -> list[Any]:
    """The ring's exchange, done when it returns: gloo hangs on Transformer Engine's pair of messages in the backward
    pass."""
    outgoing = send.contiguous().clone()
    incoming = torch.empty(receive.shape, dtype=receive.dtype)
    sent = dist.isend(outgoing, destination, group=group)
    dist.recv(incoming, source, group=group)
    sent.wait()
    receive.copy_(incoming)
    return []


def _documents(bounds: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, middle, end) of each document's tokens on a rank."""
    marks = bounds.tolist()
    for start, end in zip(marks, marks[1:], strict=False):
        yield start, (start + end) // 2, end


@kernel
def thd_read_half_tensor(t: Tensor, bounds: Tensor, half: int) -> Tensor:
    """The first or second half of each document; t [tokens, h, d], or [2, tokens, h, d]."""
    axis = 0 if t.dim() == 3 else 1
    halves = [(start, middle) if half == 0 else (middle, end) for start, middle, end in _documents(bounds)]
    return torch.cat([t.narrow(axis, a, b - a) for a, b in halves], axis).contiguous()


@kernel
def thd_second_half_lse_correction(lse: Tensor, step: Tensor, bounds: Tensor, packed: bool) -> None:
    """lse [h, tokens] of each document's second half joined with a step's [h, tokens / 2]."""
    for start, middle, end in _documents(bounds):
        total, more = lse[:, middle:end], step[:, start // 2 : start // 2 + end - middle]
        total.copy_(torch.logaddexp(total, more))


@kernel
def thd_read_second_half_lse(lse: Tensor, bounds: Tensor, packed: bool, tokens: int) -> Tensor:
    """[h, tokens / 2]."""
    return torch.cat([lse[:, middle:end] for _, middle, end in _documents(bounds)], 1)


@kernel
def thd_out_correction(out: Tensor, step: Tensor, *given: Any) -> None:
    """Adds a step's output [tokens, h, d], weighted by its share of the softmax's sum.

    2.12: `out` has its shares already; 2.20 gives the sums before this step too (`old`), and `out` is weighted anew.
    """
    *old, lse, lse_step, bounds, second_half, _ = given
    for start, middle, end in _documents(bounds):
        first = middle if second_half else start
        n, at = end - first, start // 2 if second_half else start
        if old:
            out[first:end] *= (old[0][:, first:end] - lse[:, first:end]).exp().t()[..., None].to(out.dtype)
        share = (lse_step[:, at : at + n] - lse[:, first:end]).exp().t()[..., None]
        out[first:end] += (step[at : at + n] * share).to(out.dtype)


@kernel
def thd_grad_correction(grad: Tensor, step: Tensor, bounds: Tensor, first: str, second: str) -> None:
    """What happens to each half of a document: `add` or `copy` the step's gradient, `zero`, or `none`.

    The step holds whole documents, or one half of each where the other half is `none` or `zero`.
    """
    axis = grad.dim() - 3
    whole = first in ("add", "copy") and second in ("add", "copy")
    for start, middle, end in _documents(bounds):
        for action, a, b in ((first, start, middle), (second, middle, end)):
            target = grad.narrow(axis, a, b - a)
            if action == "zero":
                target.zero_()
            elif action != "none":
                source = step.narrow(axis, a if whole else start // 2, b - a)
                target.copy_(source if action == "copy" else target + source)


@kernel
def thd_get_partitioned_indices(bounds: Tensor, tokens: int, cp: int, rank: int) -> Tensor:
    """Which tokens of the packed row [tokens / cp] a rank holds."""
    marks, parts = bounds.tolist(), []
    for start, end in zip(marks, marks[1:], strict=False):
        chunk = (end - start) // (2 * cp)
        for piece in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + piece * chunk, start + (piece + 1) * chunk, dtype=torch.int32))
    return torch.cat(parts)


def _rank_order(bounds: Tensor, ranks: int) -> Tensor:
    """int64 [tokens]: which token of the sequences lies at each place where the ranks' parts stand end to end.

    A document is cut into 2 x ranks chunks; a rank holds a chunk and the one that is as far from the end.
    """
    chunks: list[list[Tensor]] = [[] for _ in range(ranks)]
    marks = bounds.tolist()
    for start, end in zip(marks, marks[1:], strict=False):
        pieces = torch.arange(start, end).chunk(2 * ranks) if end > start else []
        for rank in range(ranks if len(pieces) else 0):
            chunks[rank] += [pieces[rank], pieces[-1 - rank]]
    return torch.cat([piece for rank in chunks for piece in rank])


@kernel
def thd_cp_rank_order_to_sequence_order(x: Tensor, bounds: Tensor, ranks: int, tokens: int) -> Tensor:
    """x [tokens, ...] of all ranks in turn, in the order of the sequences."""
    result = torch.empty_like(x)
    result[_rank_order(bounds, ranks)] = x
    return result


@kernel
def thd_sequence_order_to_cp_rank_order(x: Tensor, bounds: Tensor, ranks: int, tokens: int) -> Tensor:
    """The inverse."""
    return x[_rank_order(bounds, ranks)]
