"""The vocabulary-parallel head: hidden states to the log-probabilities, entropies, ... that a loss reads.

Owns the products with the head's weight, forward and backward, in chunks of rows. The full logits of a batch are never
gathered and never in float32: they exist in the dtype of the products, as many as `parallel.head_memory` keeps for
the backward pass, which writes their gradient in their place; the others are computed again. What is computed from the
logits is `engine/logit_fields.py`.

No gradient is computed in the forward pass: the loss's gradients of a row's fields come later and scale each row by its
own factor, so the sum over rows in the weight's gradient would need the products of all rows again. With h the hidden
size and v the rows of the weight, a row's product costs 2 h v operations and forward and backward pass 6 h v; a row
computed again costs a third more, a row kept 2 v bytes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaswift.engine.logit_fields import (
    VocabularyRows,
    gradient_coefficients,
    join_shards,
    row_statistics,
    write_gradient,
)
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.parallel.head_memory import HeadChunk, float32_parts, head_chunks


@dataclass(frozen=True)
class VocabularyHeadOptions:
    """How the products are made."""

    float32_products: bool = False
    """Products of 16-bit hidden states and weights come in float32, as they are summed, and are not rounded."""
    into_main_grad: bool = True
    """The gradient is added to the weight's float32 `main_grad`, where Megatron-Core's DDP has given it one."""


@dataclass(frozen=True)
class HeadPlan:
    """How one micro-batch passes through the head."""

    shard: VocabularyHeadShardSpec
    options: VocabularyHeadOptions
    chunks: tuple[HeadChunk, ...]


def head_plan(
    hidden: Tensor, weight: Tensor, shard: VocabularyHeadShardSpec, options: VocabularyHeadOptions
) -> HeadPlan:
    """Choose the chunks of rows of hidden [t, h]; call it where autograd is as it is for the head."""
    backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    product_bytes = 4 if options.float32_products else hidden.element_size()
    chunks = head_chunks(hidden.shape[0], weight.shape[0] * product_bytes, hidden.device.type, backward)
    return HeadPlan(shard, options, tuple(chunks))


def compute_vocabulary_fields(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec, options: VocabularyHeadOptions
) -> Tensor:
    """(hidden [t, h], weight [v, h], labels [t]) to the fields [f, t] in float32."""
    return VocabularyHeadFunction.apply(hidden, weight, labels, head_plan(hidden, weight, shard, options))


def head_product(hidden: Tensor, weight: Tensor, options: VocabularyHeadOptions) -> Tensor:
    """hidden [r, h] times weight [v, h]: [r, v]."""
    if not options.float32_products or hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    out = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
    rows = hidden.float()
    for some in float32_parts(len(weight), max(weight.shape[1], len(hidden))):
        torch.mm(rows, weight[some].float().t(), out=out[:, some])
    return out


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total [v, h] += d_logits [r, v] transposed times hidden [r, h], summed in total's dtype."""
    if total.dtype == d_logits.dtype:
        total.addmm_(d_logits.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, d_logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        rows = hidden.to(total.dtype)
        for some in float32_parts(len(total), max(total.shape[1], len(hidden))):
            total[some].addmm_(d_logits[:, some].to(total.dtype).t(), rows)


class VocabularyHeadFunction(torch.autograd.Function):
    """`compute_vocabulary_fields`, differentiable.

    The gradient of `hidden` is this shard's part: the caller's region function sums it over the tensor-parallel ranks.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, plan: HeadPlan) -> Tensor:
        """The fields; keeps the products of the first chunks."""
        statistics = []
        ctx.kept = []
        ctx.plan = plan
        ctx.done = False
        for c in plan.chunks:
            products = head_product(hidden[c.start : c.stop], weight, plan.options)
            statistics.append(row_statistics(products, labels[c.start : c.stop], plan.shard))
            if c.kept:
                ctx.kept.append(products)
            del products  # before the next chunk's are made
        rows = join_shards(torch.cat(statistics, dim=1), labels, weight.shape[0], plan.shard)
        ctx.main_grad = main_grad_of(weight, plan.options)
        ctx.save_for_backward(hidden, weight, labels, rows.fields, rows.kept)
        return rows.fields

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `hidden` and `weight`, chunk by chunk; overwrites what was kept, so it runs once."""
        assert not ctx.done, "the head's backward pass has run already, and its products are gone"
        ctx.done = True
        plan = ctx.plan
        hidden, weight, labels, fields, numbers = ctx.saved_tensors
        rows = VocabularyRows(fields, numbers)
        coefficients = gradient_coefficients(grads, rows, weight.shape[0], plan.shard)

        def write(products: Tensor, some: slice, d_logits: Tensor) -> None:
            write_gradient(products, labels[some], coefficients[:, some], plan.shard, d_logits)

        return (*gradients_by_chunks(ctx, hidden, weight, plan, write), None, None)


def gradients_by_chunks(
    ctx: Any, hidden: Tensor, weight: Tensor, plan: HeadPlan, write: Callable[[Tensor, slice, Tensor], None]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `hidden` and `weight`, chunk by chunk, for a function whose context has `kept` products
    and the weight's `main_grad`.

    Args:
        write: Writes the gradient of products [r, v] at some rows into a tensor [r, v], which may be the products.
    """
    d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    total = None
    if ctx.needs_input_grad[1]:
        direct = ctx.main_grad is not None and ctx.main_grad.dtype == torch.float32
        total = ctx.main_grad if direct else torch.zeros_like(weight, dtype=torch.float32)
    for c in plan.chunks:
        some = slice(c.start, c.stop)
        products = ctx.kept.pop(0) if c.kept else head_product(hidden[some], weight, plan.options)
        same = products.dtype == hidden.dtype
        d_logits = products if same else torch.empty_like(products, dtype=hidden.dtype)
        write(products, some, d_logits)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden[some])
        if total is not None:
            _add_product(total, d_logits, hidden[some])
        del products, d_logits
    return d_hidden, _weight_gradient(weight, ctx.main_grad, total)


def main_grad_of(weight: Tensor, options: VocabularyHeadOptions) -> Tensor | None:
    """The tensor to which the weight's gradient is added; None where autograd brings it."""
    return weight.main_grad if options.into_main_grad and hasattr(weight, "main_grad") else None


def _weight_gradient(weight: Tensor, main_grad: Tensor | None, total: Tensor | None) -> Tensor | None:
    """What autograd gets as the weight's gradient once `total` has it.

    Where `total` is `main_grad`, as in Megatron-Core's `LinearWithGradAccumulationAndAsyncCommunication`:
    `grad_added_to_main_grad` tells the hook of its DDP to drop the gradient, which is some tensor of the right shape,
    since the hook asks for one. It is made when the products are gone. A weight with
    `zero_out_wgrad` is the embedding of this stage too. Its hook adds what autograd brings, which is the embedding's
    gradient, and nothing from here.
    """
    if total is None or total is not main_grad:
        return None if total is None else total.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return None
    return torch.empty_like(weight)
