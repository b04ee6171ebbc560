"""Cross entropy over vocabulary shards: Transformer Engine's Triton kernels, whose launches stay Transformer Engine's.

Each release has its own kernels. 2.12 writes gradients over the logits in the forward pass; 2.20 keeps the logits (a
copy, if asked for) and the softmax's statistics for the backward pass. Memory is written behind autograd's back, as
kernels do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import triton_kernel

OWNER = "transformer_engine.common.triton.cross_entropy"
OLD, NEW = "2.12.0", "2.20.2"


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum [n] and the sum of exponentials above it [n] of rows x [n, v] in float32."""
    largest = x.amax(1)
    return largest, (x - largest[:, None]).exp().sum(1)


def _of_label(x: Tensor, y: Tensor, start: int) -> Tensor:
    """The label's logit [n], -inf where this shard, whose first column is `start`, does not have it."""
    column = y - start
    held = (column >= 0) & (column < x.shape[1])
    return torch.where(held, x.gather(1, column.clamp(0, x.shape[1] - 1)[:, None])[:, 0], -torch.inf)


def _merged(largest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics [n] of whole rows from those of the shards [shards, n]."""
    whole = largest.amax(0)
    return whole, (total * (largest - whole).exp()).sum(0)


def _losses(label: Tensor, largest: Tensor, total: Tensor, x_sum: Tensor, smoothing: float, vocab: int) -> Tensor:
    """[n]; `x_sum`: the sums of the rows' logits, for label smoothing."""
    normalizer = largest + total.log()
    if not smoothing:
        return normalizer - label
    return (1 - smoothing) * (normalizer - label) + smoothing * (normalizer - x_sum / vocab)


def _gradient(x: Tensor, y: Tensor, start: int, stats: tuple[Tensor, Tensor], smoothing: float, vocab: int) -> Tensor:
    """Of the losses by the logits [n, v] of a shard, the label's column apart."""
    columns = start + torch.arange(x.shape[1])
    target = (columns[None] == y[:, None]) * (1 - smoothing)
    return (x - stats[0][:, None]).exp() / stats[1][:, None] - smoothing / vocab - target


def _rows(x: Tensor, n: int, stride: int, columns: int) -> Tensor:
    """The memory that a kernel writes rows to [n, columns]."""
    return x.data.as_strided((n, columns), (stride, 1))


@triton_kernel(OWNER, OLD)
def online_softmax_kernel(
    programs: int,
    *,
    X_ptr: Tensor,  # noqa: N803
    X_stride: int,  # noqa: N803
    Y_ptr: Tensor,  # noqa: N803
    Y_stride: int,  # noqa: N803
    m_d_X_y_ptr: Tensor,  # noqa: N803
    m_d_X_y_stride: int,  # noqa: N803
    rank: int,
    n_cols: int,
    ignore_idx: int,
    n_non_ignore: Tensor,
    **launch: Any,
) -> None:
    """A shard's statistics and label logits [n, 3], and the number of labels."""
    x = _rows(X_ptr, programs, X_stride, n_cols).float()
    y = Y_ptr.as_strided((programs,), (Y_stride,))
    n_non_ignore += (y != ignore_idx).sum()
    m_d_X_y_ptr.view(programs, 3).copy_(torch.stack([*_statistics(x), _of_label(x, y, rank * n_cols)], 1))


@triton_kernel(OWNER, OLD)
def cross_entropy_kernel(
    programs: int,
    *,
    X_ptr: Tensor,  # noqa: N803
    X_stride: int,  # noqa: N803
    Y_ptr: Tensor,  # noqa: N803
    Y_stride: int,  # noqa: N803
    loss_ptr: Tensor,
    m_d_X_y_ptr: Tensor,  # noqa: N803
    rank: int,
    world_size: int,
    ignore_idx: int,
    n_cols: int,
    n_non_ignore: Tensor,
    reduce_loss: bool,
    label_smoothing: float,
    **launch: Any,
) -> None:
    """Losses, and gradients over the logits. As in the kernel, label smoothing adds up this shard's logits alone."""
    target = _rows(X_ptr, programs, X_stride, n_cols)
    x, y = target.float(), Y_ptr.as_strided((programs,), (Y_stride,))
    largest, total, label = m_d_X_y_ptr.view(world_size, programs, 3).unbind(-1)
    stats, vocab, used = _merged(largest, total), n_cols * world_size, y != ignore_idx
    losses = _losses(label.amax(0), *stats, x.sum(1), label_smoothing, vocab)
    gradient = _gradient(x, y, rank * n_cols, stats, label_smoothing, vocab)
    target.copy_(torch.where(used[:, None], gradient / (n_non_ignore if reduce_loss else 1), 0.0))
    loss_ptr.copy_(torch.where(used, losses, 0.0))


@triton_kernel(OWNER, OLD)
def element_mul_kernel(
    programs: int, x: Tensor, stride: int, grad: Tensor, grad_stride: int, columns: int, **launch: Any
) -> None:
    """Rows times the gradient of their loss."""
    rows = _rows(x, programs, stride, columns)
    rows.copy_(rows.float() * grad.as_strided((programs, 1), (grad_stride, 1)).float())


@triton_kernel(OWNER, NEW)
def cross_entropy_forward_kernel(
    programs: int,
    *,
    X_ptr: Tensor,  # noqa: N803
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,  # noqa: N803
    loss_ptr: Tensor,
    stats_ptr: Tensor,
    n_non_ignore: Tensor,
    n_cols: int,
    ignore_idx: int,
    label_smoothing: float,
    COUNT_NON_IGNORE: bool,  # noqa: N803
    COPY_INPUT: bool,  # noqa: N803
    **launch: Any,
) -> None:
    """Losses and statistics [n, 2] of whole rows, and a copy of the logits."""
    x, y = X_ptr.detach().reshape(programs, n_cols), Y_ptr.reshape(-1)
    if COPY_INPUT:
        saved_input_ptr.data.view(programs, n_cols).copy_(x)
    if COUNT_NON_IGNORE:
        n_non_ignore += (y != ignore_idx).sum()
    x = x.float()
    stats = _statistics(x)
    stats_ptr.copy_(torch.stack(stats, 1))
    losses = _losses(_of_label(x, y, 0), *stats, x.sum(1), label_smoothing, n_cols)
    loss_ptr.copy_(torch.where(y != ignore_idx, losses, 0.0))


@triton_kernel(OWNER, NEW)
def cross_entropy_tp_pre_kernel(
    programs: int,
    *,
    X_ptr: Tensor,  # noqa: N803
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,  # noqa: N803
    local_data_ptr: Tensor,
    n_non_ignore: Tensor,
    rank: int,
    n_cols: int,
    ignore_idx: int,
    COUNT_NON_IGNORE: bool,  # noqa: N803
    COMPUTE_X_SUM: bool,  # noqa: N803
    COPY_INPUT: bool,  # noqa: N803
    **launch: Any,
) -> None:
    """A shard's statistics, label logits and sums of logits [n, 4]."""
    x, y = X_ptr.detach().reshape(programs, n_cols), Y_ptr.reshape(-1)
    if COPY_INPUT:
        saved_input_ptr.data.view(programs, n_cols).copy_(x)
    if COUNT_NON_IGNORE:
        n_non_ignore += (y != ignore_idx).sum()
    x = x.float()
    x_sum = x.sum(1) if COMPUTE_X_SUM else torch.zeros(programs)
    local_data_ptr.copy_(torch.stack([*_statistics(x), _of_label(x, y, rank * n_cols), x_sum], 1))


@triton_kernel(OWNER, NEW)
def cross_entropy_tp_post_kernel(
    programs: int,
    *,
    gathered_data_ptr: Tensor,
    Y_ptr: Tensor,  # noqa: N803
    loss_ptr: Tensor,
    stats_ptr: Tensor,
    world_size: int,
    n_cols: int,
    ignore_idx: int,
    label_smoothing: float,
    **launch: Any,
) -> None:
    """Losses and statistics [n, 2] of whole rows from those of the shards."""
    largest, total, label, x_sum = gathered_data_ptr.view(world_size, programs, 4).unbind(-1)
    stats = _merged(largest, total)
    stats_ptr.copy_(torch.stack(stats, 1))
    losses = _losses(label.amax(0), *stats, x_sum.sum(0), label_smoothing, n_cols * world_size)
    loss_ptr.copy_(torch.where(Y_ptr.reshape(-1) != ignore_idx, losses, 0.0))


@triton_kernel(OWNER, NEW)
def cross_entropy_backward_kernel(
    programs: int,
    *,
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,  # noqa: N803
    stats_ptr: Tensor,
    n_non_ignore_ptr: Tensor,
    grad_output_ptr: Tensor,
    grad_output_stride: int,
    rank: int,
    world_size: int,
    n_cols: int,
    ignore_idx: int,
    reduce_loss: bool,
    label_smoothing: float,
    **launch: Any,
) -> None:
    """Gradients over the saved logits."""
    target, y = saved_input_ptr.data.view(programs, n_cols), Y_ptr.reshape(-1)
    stats = (stats_ptr[:, 0], stats_ptr[:, 1])
    gradient = _gradient(target.float(), y, rank * n_cols, stats, label_smoothing, n_cols * world_size)
    scale = grad_output_ptr.as_strided((programs,), (grad_output_stride,)).float()
    scale = scale / (n_non_ignore_ptr if reduce_loss else 1)
    target.copy_(torch.where((y != ignore_idx)[:, None], gradient * scale[:, None], 0.0))
