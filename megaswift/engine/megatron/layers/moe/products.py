"""Products of rows that are sorted by expert with each expert's matrix, by torch's grouped product.

The numbers of rows stay on the device, so the host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ExpertRows:
    """Which of the sorted rows belong to which expert."""

    counts: Tensor
    """Rows of each expert [experts]; together they are all rows."""
    ends: Tensor
    """One past the last row of each expert, int32 [experts]."""

    @classmethod
    def of(cls, counts: Tensor) -> ExpertRows:
        """From the number of rows of each expert."""
        return cls(counts, counts.cumsum(0, dtype=torch.int32))


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows with their expert's matrix.

    Args:
        x: rows [t, in].
        matrices: one for each expert [experts, in, out].
        ends: one past the last row of each expert, int32 [experts].

    Returns:
        [t, out].
    """
    if not len(x):
        return x.new_empty(0, matrices.shape[2])
    return F.grouped_mm(x, matrices, offs=ends)


def grouped_weight_gradients(grad: Tensor, x: Tensor, rows: ExpertRows) -> Tensor:
    """Return the gradients of weights [experts, out, in] from those of the outputs [t, out] and the inputs [t, in].

    Those of an expert without rows are set to zero here: on Blackwell torch leaves them unwritten (pytorch issue
    172439). The host does not know which experts that are, so all gradients are read and written once more.
    """
    if not len(x):
        return x.new_zeros(len(rows.counts), grad.shape[1], x.shape[1])
    gradients = F.grouped_mm(grad.t(), x, offs=rows.ends)
    return gradients.masked_fill_((rows.counts == 0)[:, None, None], 0)


class _GroupedLinear(torch.autograd.Function):
    """Keeps the weights themselves for the backward pass, neither their copy in one tensor nor a scaled one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, ends: Tensor, scale: float, *weights: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x, counts, ends, *weights)
        return grouped_product(x, _scaled(_side_by_side(weights), scale).transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, counts, ends, *weights = ctx.saved_tensors
        grad = _with_rows_in_memory(grads[0])
        inputs = None
        if ctx.needs_input_grad[0]:
            inputs = grouped_product(grad, _scaled(_side_by_side(weights), ctx.scale), ends)
        gradients = _scaled(grouped_weight_gradients(grad, x, ExpertRows(counts, ends)), ctx.scale)
        return inputs, None, None, None, *gradients.split([w.shape[1] for w in weights], dim=1)


def grouped_linear(x: Tensor, rows: ExpertRows, *weights: Tensor, scale: float = 1.0) -> Tensor:
    """Apply each expert's linear layers, which share their input, to its rows.

    Args:
        x: rows [t, in], a multiple of 16 bytes each.
        rows: which of them belong to which expert.
        weights: of each layer those of all experts [experts, out, in], trained.
        scale: what they are multiplied with first.

    Returns:
        [t, sum of out], the layers side by side.
    """
    outputs: Tensor = _GroupedLinear.apply(x, rows.counts, rows.ends, scale, *weights)
    return outputs


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """[experts, sum of out, in]; a single layer's as they lie."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights), dim=1)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor * scale


def _with_rows_in_memory(grad: Tensor) -> Tensor:
    """The gradient as grouped products read it: also columns of a wider one, but nothing expanded or transposed."""
    return grad if grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()
