"""Triton kernels for `logit_fields`: the statistics of rows of logits and the gradient of logits,
each in one pass.

Not run on a GPU: compared with plain torch in Triton's interpreter
(`tests/engine/test_logit_fields_triton.py`). The package triton comes with the CUDA builds of torch;
nothing imports this module without it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec

STATISTICS_BLOCK = 4096
"""Columns of a step of a program over its row."""
GRADIENT_BLOCK = 2048
"""Columns of a program of the gradient."""
# Bits of the kernels' `flags`: a soft cap, and what the requested fields, or those with a gradient, need. Kernels,
# which read no variables of a module, have the numbers.
CAP = 1
ENTROPY = 2
SQUARES = 4
MEAN = 8


@triton.jit
def _logits(x: tl.tensor, factors: tl.tuple, flags: tl.constexpr) -> tl.tensor:
    """float32 logits of products; `factors`: scale, cap, temperature."""
    logits = x.to(tl.float32) * factors[0]
    if flags & 1:  # soft cap
        logits = (2 * tl.sigmoid(2 * logits / factors[1]) - 1) * factors[1]
    return logits / factors[2]


@triton.jit
def _logit_statistics_kernel(
    rows: tl.tuple, labels: tl.tuple, stats: tl.tuple, factors: tl.tuple, flags: tl.constexpr, block: tl.constexpr
) -> None:
    """A row a program: sums relative to the largest logit so far, rescaled where a block has a larger one. `rows`:
    products, their stride and width; `labels`: their columns, whether they lie here; `stats`: [6, t] and its stride."""
    row = tl.program_id(0).to(tl.int64)
    products = rows[0] + row * rows[1]
    stats_of = stats[0] + row
    label = tl.load(labels[0] + row)
    here = tl.load(labels[1] + row) != 0
    top = -1e30
    count = 0.0
    own = 0.0
    others = 0.0
    weighted = 0.0
    squares = 0.0
    total = 0.0
    for start in range(0, rows[2], block):
        column = start + tl.arange(0, block)
        real = column < rows[2]
        x = tl.load(products + column, mask=real, other=0.0)
        logits = tl.where(real, _logits(x, factors, flags), -1e30)
        higher = tl.maximum(top, tl.max(logits, axis=0))
        below = top - higher
        factor = tl.exp(top - higher)
        shifted = tl.where(real, logits - higher, 0.0)
        powers = tl.where(real, tl.exp(shifted), 0.0)
        if flags & 2:  # entropy
            weighted = (weighted + own * below) * factor + tl.sum(powers * shifted, axis=0)
            own = own * factor + tl.sum(powers, axis=0)
        if flags & 4:  # log_sum_sq
            squares = squares * factor * factor + tl.sum(powers * powers, axis=0)
        if flags & 8:  # mean_logit
            total = total + count * below + tl.sum(shifted, axis=0)
            count += tl.sum(real.to(tl.float32), axis=0)
        others = others * factor + tl.sum(tl.where((column == label) & here, 0.0, powers), axis=0)
        top = higher
    at_label = _logits(tl.load(products + label), factors, flags)
    tl.store(stats_of, top)
    tl.store(stats_of + stats[1], others)
    tl.store(stats_of + 2 * stats[1], tl.where(here, at_label, 0.0))
    tl.store(stats_of + 3 * stats[1], weighted)
    tl.store(stats_of + 4 * stats[1], squares)
    tl.store(stats_of + 5 * stats[1], total)


@triton.jit
def _logit_gradient_kernel(
    rows: tl.tuple, labels: tl.tuple, gradients: tl.tuple, factors: tl.tuple, flags: tl.constexpr, block: tl.constexpr
) -> None:
    """A block of a row a program, which reads its block before it writes it, so `out` may be the products.
    `gradients`: out and its stride, the coefficients [9, t] and theirs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    real = column < rows[2]
    label = tl.load(labels[0] + row)
    here = tl.load(labels[1] + row) != 0
    own = gradients[2] + row
    stride = gradients[3]
    x = tl.load(rows[0] + row * rows[1] + column, mask=real, other=0.0)
    logits = _logits(x, factors, flags)
    shifted = logits - tl.load(own)
    p = tl.exp(shifted) * tl.load(own + stride)
    at_label = (column == label) & here
    slope = tl.load(own + 3 * stride) + tl.where(at_label, tl.load(own + 7 * stride), 0.0)
    if flags & 2:  # entropy
        slope += tl.load(own + 4 * stride) * (shifted - tl.load(own + 2 * stride))
    if flags & 4:  # log_sum_sq
        slope += tl.load(own + 5 * stride) * p
    gradient = p * slope + tl.where(at_label, tl.load(own + 8 * stride), 0.0)
    if flags & 8:  # mean_logit
        gradient += tl.load(own + 6 * stride)
    if flags & 1:  # soft cap
        share = logits * factors[2] / factors[1]
        gradient *= 1 - share * share
    out = gradients[0] + row * gradients[1] + column
    tl.store(out, gradient.to(gradients[0].dtype.element_ty), mask=real)


def write_row_statistics_by_triton(
    products: Tensor, labels: tuple[Tensor, Tensor], shard: VocabularyHeadShardSpec, stats: Tensor
) -> None:
    """Write statistics [6, t] of products [t, n] without padding.

    `labels` [t]: each label's column, and whether it lies on this shard.
    """
    if not len(products):
        return
    assert products.stride(1) == stats.stride(1) == 1
    _logit_statistics_kernel[(len(products),)](
        (products, products.stride(0), products.shape[1]),
        labels,
        (stats, stats.stride(0)),
        _factors(shard),
        _flags(shard.softcap, shard.fields),
        STATISTICS_BLOCK,
        num_warps=8,
    )


def write_logit_gradient_by_triton(
    products: Tensor, labels: tuple[Tensor, Tensor], coefficients: Tensor, shard: VocabularyHeadShardSpec, out: Tensor
) -> None:
    """Write the gradient [t, n] into `out`; `labels` are those of the statistics."""
    if not len(products):
        return
    assert products.stride(1) == out.stride(1) == coefficients.stride(1) == 1
    width = products.shape[1]
    _logit_gradient_kernel[(len(products), triton.cdiv(width, GRADIENT_BLOCK))](
        (products, products.stride(0), width),
        labels,
        (out, out.stride(0), coefficients, coefficients.stride(0)),
        _factors(shard),
        _flags(shard.softcap, shard.differentiable),
        GRADIENT_BLOCK,
        num_warps=4,
    )


def _factors(shard: VocabularyHeadShardSpec) -> tuple[float, float, float]:
    """(scale, cap, temperature) as the kernels take them."""
    return shard.scale, shard.softcap or 1.0, shard.temperature


def _flags(softcap: float | None, fields: tuple[str, ...]) -> int:
    of_fields = {"entropy": ENTROPY, "log_sum_sq": SQUARES, "mean_logit": MEAN}
    return (CAP if softcap is not None else 0) + sum(bit for name, bit in of_fields.items() if name in fields)
