"""Triton kernels for `vocabulary_rows`: the statistics of rows of logits and the gradient of logits, each in one pass.

Not run on a GPU: compared with plain torch in Triton's interpreter (`tests/engine/test_vocabulary_rows_triton.py`). The
package triton comes with the CUDA builds of torch; nothing imports this module without it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megaswift.engine.vocabulary_rows import VocabularyHeadShardSpec

STATISTICS_BLOCK, GRADIENT_BLOCK = 4096, 2048
"""Columns of a step of a program over its row, and of a program of the gradient."""


@triton.jit
def _logits(x, scale, cap, temperature, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """float32 logits of products."""
    logits = x.to(tl.float32) * scale
    if HAS_CAP:
        logits = (2 * tl.sigmoid(2 * logits / cap) - 1) * cap
    return logits / temperature


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (a kernel's pointers, strides and constants)
    products,
    row_stride,
    labels,
    in_shard,
    stats,
    stats_stride,
    width,
    scale,
    cap,
    temperature,
    HAS_CAP: tl.constexpr,  # noqa: N803
    ENTROPY: tl.constexpr,  # noqa: N803
    SQUARES: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A row a program: sums relative to the largest logit so far, rescaled where a block has a larger one."""
    row = tl.program_id(0).to(tl.int64)
    label, here = tl.load(labels + row), tl.load(in_shard + row) != 0
    top, count = -1e30, 0.0
    own, others, weighted, squares, total = 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < width
        x = tl.load(products + row * row_stride + column, mask=real, other=0.0)
        logits = tl.where(real, _logits(x, scale, cap, temperature, HAS_CAP), -1e30)
        higher = tl.maximum(top, tl.max(logits, axis=0))
        below, factor = top - higher, tl.exp(top - higher)
        shifted = tl.where(real, logits - higher, 0.0)
        powers = tl.where(real, tl.exp(shifted), 0.0)
        if ENTROPY:
            weighted = (weighted + own * below) * factor + tl.sum(powers * shifted, axis=0)
            own = own * factor + tl.sum(powers, axis=0)
        if SQUARES:
            squares = squares * factor * factor + tl.sum(powers * powers, axis=0)
        if SUM:
            total = total + count * below + tl.sum(shifted, axis=0)
            count += tl.sum(real.to(tl.float32), axis=0)
        others = others * factor + tl.sum(tl.where((column == label) & here, 0.0, powers), axis=0)
        top = higher
    at_label = _logits(tl.load(products + row * row_stride + label), scale, cap, temperature, HAS_CAP)
    tl.store(stats + row, top)
    tl.store(stats + stats_stride + row, others)
    tl.store(stats + 2 * stats_stride + row, tl.where(here, at_label, 0.0))
    tl.store(stats + 3 * stats_stride + row, weighted)
    tl.store(stats + 4 * stats_stride + row, squares)
    tl.store(stats + 5 * stats_stride + row, total)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (a kernel's pointers, strides and constants)
    products,
    row_stride,
    out,
    out_stride,
    labels,
    in_shard,
    coefficients,
    coefficients_stride,
    width,
    scale,
    cap,
    temperature,
    HAS_CAP: tl.constexpr,  # noqa: N803
    LOGARITHMIC: tl.constexpr,  # noqa: N803
    QUADRATIC: tl.constexpr,  # noqa: N803
    CONSTANT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block of a row a program; reads its block before it writes it, so `out` may be `products`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    label, here = tl.load(labels + row), tl.load(in_shard + row) != 0
    own = coefficients + row
    shift, inverse_total = tl.load(own), tl.load(own + coefficients_stride)
    x = tl.load(products + row * row_stride + column, mask=real, other=0.0)
    logits = _logits(x, scale, cap, temperature, HAS_CAP)
    shifted = logits - shift
    p = tl.exp(shifted) * inverse_total
    slope = tl.load(own + 3 * coefficients_stride) + tl.zeros([BLOCK], tl.float32)
    if LOGARITHMIC:
        slope += tl.load(own + 4 * coefficients_stride) * (shifted - tl.load(own + 2 * coefficients_stride))
    if QUADRATIC:
        slope += tl.load(own + 5 * coefficients_stride) * p
    at_label = (column == label) & here
    slope += tl.where(at_label, tl.load(own + 7 * coefficients_stride), 0.0)
    gradient = p * slope + tl.where(at_label, tl.load(own + 8 * coefficients_stride), 0.0)
    if CONSTANT:
        gradient += tl.load(own + 6 * coefficients_stride)
    if HAS_CAP:
        share = logits * temperature / cap
        gradient *= 1 - share * share
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=real)


def write_row_statistics(
    products: Tensor, local: Tensor, in_shard: Tensor, shard: VocabularyHeadShardSpec, stats: Tensor
) -> None:
    """Statistics [6, t] of products [t, n] without padding; `local` and `in_shard` [t] say where the labels are."""
    if not len(products):
        return
    assert products.stride(1) == 1 and stats.stride(1) == 1
    _statistics_kernel[(len(products),)](
        products,
        products.stride(0),
        local,
        in_shard,
        stats,
        stats.stride(0),
        products.shape[1],
        *_factors(shard),
        HAS_CAP=shard.softcap is not None,
        ENTROPY="entropy" in shard.fields,
        SQUARES="log_sum_sq" in shard.fields,
        SUM="mean_logit" in shard.fields,
        BLOCK=STATISTICS_BLOCK,
        num_warps=8,
    )


def write_gradient(
    products: Tensor,
    labels: tuple[Tensor, Tensor],
    coefficients: Tensor,
    shard: VocabularyHeadShardSpec,
    out: Tensor,
) -> None:
    """The gradient [t, n] into `out`; `labels`: `local` and `in_shard` as above."""
    if not len(products):
        return
    assert products.stride(1) == out.stride(1) == coefficients.stride(1) == 1
    width = products.shape[1]
    _gradient_kernel[(len(products), triton.cdiv(width, GRADIENT_BLOCK))](
        products,
        products.stride(0),
        out,
        out.stride(0),
        *labels,
        coefficients,
        coefficients.stride(0),
        width,
        *_factors(shard),
        HAS_CAP=shard.softcap is not None,
        LOGARITHMIC="entropy" in shard.differentiable,
        QUADRATIC="log_sum_sq" in shard.differentiable,
        CONSTANT="mean_logit" in shard.differentiable,
        BLOCK=GRADIENT_BLOCK,
        num_warps=4,
    )


def _factors(shard: VocabularyHeadShardSpec) -> tuple[float, float, float]:
    """(scale, cap, temperature) as the kernels take them."""
    return shard.scale, shard.softcap or 1.0, shard.temperature
