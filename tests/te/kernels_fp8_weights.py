"""Weights kept in FP8: scales of many tensors at once, and a rank's part of a weight in blocks.

A part is a run of elements of the flat weight [h, w]; its blocks are those of the whole weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.kernels_quantize import cast, float8, scale_of
from tests.te.registry import DType, kernel


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, overflow: Tensor, lists: list[list[Tensor]], largest: float, power_of_2: bool, epsilon: float
) -> None:
    """Lists: magnitudes, scales, their inverses."""
    formats = {torch.finfo(float8(d)).max: float8(d) for d in (DType["kFloat8E4M3"], DType["kFloat8E5M2"])}
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_of(amax.float(), formats[largest], power_of_2, epsilon))
        inverse.copy_(1 / scale)


def _block_of(size: tuple[int, int], start: int, count: int, block: int) -> tuple[Tensor, Tensor]:
    """(row, column) of the block of each element start .. start + count - 1."""
    places = torch.arange(start, start + count)
    return places // size[1] // block, places % size[1] // block


@kernel
def fp8_block_scaling_compute_partial_amax(part: Tensor, amax: Tensor, h: int, w: int, start: int, block: int) -> None:
    """Largest magnitudes of each block, of this part of it, into `amax` [h / block, w / block]."""
    row, column = _block_of((h, w), start, part.numel(), block)
    flat = torch.zeros(amax.numel())
    flat.scatter_reduce_(0, row * amax.shape[1] + column, part.reshape(-1).float().abs(), "amax")
    amax.copy_(flat.view(amax.shape))


@kernel
def fp8_block_scaling_partial_cast(
    part: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start: int, block: int, dtype: Any
) -> None:
    """The part's bytes by its blocks' scales."""
    row, column = _block_of((h, w), start, part.numel(), block)
    out.copy_(cast(part.reshape(-1).float(), scale[row, column], float8(dtype)).view(out.shape))
