"""Matrices in NF4: four bits a value and a float32 scale for each block of inputs (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314).

Owns the codebook and both directions on real tensors; which weights are held so is
`models.qlora`. Blocks run along rows, so a shard of a matrix is quantized to the very values of
the whole one. Values and bytes are bitsandbytes' (quant_type nf4, blocksize 64, no double quantization). That package
is not used here: importing it (0.50) on a CPU looks for kernels on the hub."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from megaswift.models.qlora import BAND, BLOCK

CODE = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""The sixteen values of NF4 (arXiv:2305.14314, appendix E)."""
_BOUNDS = ((CODE[1:] + CODE[:-1]) / 2).tolist()
_PAIRS = torch.stack([CODE.repeat_interleave(16), CODE.repeat(16)], dim=1)
"""[256, 2]: the two values of a byte, the high half first."""
_SMALLEST = 1e-38
"""Keeps the inverse of an empty block's scale finite, as in bitsandbytes."""


def _bands(shape: tuple[int, ...], device: torch.device) -> Iterator[slice]:
    """Ranges of rows of a matrix that are worked on at a time."""
    step = max(1, BAND.get(device.type, BAND["cuda"]) // max(1, shape[1]))
    return (slice(row, row + step) for row in range(0, shape[0], step))


@torch.no_grad()
def nf4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [out, in] to two values a byte, uint8 [out, in / 2], and the largest magnitudes, float32 [out, in /
    64]."""
    out, width = weight.shape
    assert width % BLOCK == 0, f"rows of {width} are not a multiple of {BLOCK}"
    packed = torch.empty(out, width // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(out, width // BLOCK, dtype=torch.float32, device=weight.device)
    for rows in _bands((out, width), weight.device):
        blocks = weight[rows].float().unflatten(1, (-1, BLOCK))
        absmax[rows] = blocks.abs().amax(-1)
        scaled = (blocks * (1.0 / absmax[rows].clamp(min=_SMALLEST)).unsqueeze(-1)).clamp_(-1, 1).flatten(1)
        codes = torch.zeros_like(scaled, dtype=torch.uint8)
        for bound in _BOUNDS:  # twice as fast as a search
            codes += scaled > bound
        packed[rows] = (codes[:, ::2] << 4) | codes[:, 1::2]
    return packed, absmax


@torch.no_grad()
def nf4_dequantize(packed: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `nf4_quantize`: [out, in], each product of code and scale rounded once to `dtype`."""
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=dtype, device=packed.device)
    for rows in _bands(out.shape, packed.device):
        values = _pairs(packed.device).index_select(0, packed[rows].flatten().int())  # [rows x in / 2, 2]
        out[rows] = values.view(-1, absmax.shape[1], BLOCK).mul_(absmax[rows].unsqueeze(-1)).flatten(1)
    return out


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The table where it is read."""
    return _PAIRS.to(device)
