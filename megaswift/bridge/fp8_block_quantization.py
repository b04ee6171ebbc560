"""Weights in FP8 with a scale for each block of 128 x 128, the layout of DeepSeek-V3 (arXiv 2412.19437) that
transformers and vLLM read: float8 e4m3 W [n, m] beside float32 W_scale_inv [n / 128, m / 128].

Owns the arithmetic and the tensors of such a folder. A few rows of blocks are held at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from megaswift.bridge.hf_safetensors_source import TensorMeta, WeightSource
from megaswift.bridge.streaming_folder_job import BLOCK, read_tensor_blocks

SIDE = 128
"""Rows and columns that share a scale."""
SCALE = "_scale_inv"
DTYPE = torch.float8_e4m3fn
LARGEST = float(torch.finfo(DTYPE).max)


def fits_fp8_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of whole blocks; transformers reads no others."""
    return len(shape) == 2 and shape[0] % SIDE == 0 and shape[1] % SIDE == 0


def quantize_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [n, m], float32 scales [n / 128, m / 128]) of a matrix [n, m]: the largest value of a block becomes 448.

    The order of operations is that of transformers' own quantization, which gives the same bits.
    """
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // SIDE, SIDE, columns // SIDE, SIDE)
    largest = blocks.abs().amax(dim=(1, 3))
    factors = torch.where(largest > 0, LARGEST / largest.where(largest > 0, 1.0), 1.0)
    stored = (blocks * factors[:, None, :, None]).clamp(-LARGEST, LARGEST).to(DTYPE)
    return stored.reshape(rows, columns), 1.0 / factors


def fp8_folder_tensors(source: WeightSource, quantized: Collection[str]) -> dict[str, TensorMeta]:
    """Every tensor of the folder: these in FP8, each before its scales, and the others as they are."""
    metas: dict[str, TensorMeta] = {}
    for name in source.names():
        shape = source.shape(name)
        metas[name] = TensorMeta(shape, DTYPE if name in quantized else source.dtype(name))
        if name in quantized:
            metas[name + SCALE] = TensorMeta((shape[0] // SIDE, shape[1] // SIDE), torch.float32)
    return metas


def fp8_tensor_blocks(source: WeightSource, quantized: Collection[str], name: str) -> Iterator[Tensor]:
    """A tensor of the folder in row-major order; scales are computed from the weights again."""
    weight = name.removesuffix(SCALE)
    if name not in quantized and weight not in quantized:
        yield from read_tensor_blocks(source, name)
        return
    rows, columns = source.shape(weight)
    band = SIDE * max(1, BLOCK // (SIDE * columns * torch.float32.itemsize))
    for first in range(0, rows, band):
        part = source.slice(weight, (slice(first, min(first + band, rows)), slice(0, columns)))
        yield quantize_fp8_blocks(part)[0 if name in quantized else 1]
