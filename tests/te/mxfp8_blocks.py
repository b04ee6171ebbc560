"""MXFP8: blocks of 32 consecutive values of a row or of a column, each with a power of 2 as its scale, stored as that
power's exponent in one byte (E8M0).

Owns the bytes, the scales in the shapes that Transformer Engine stores, and the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIDE = 32
BIAS = 127
"""Of the exponent in a scale's byte."""
PADDING = {False: (128, 4), True: (4, 128)}
"""Columnwise or not -> multiples of the stored scales' two sizes."""


def exponents(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of the least powers of 2 that blocks of these magnitudes are divided by to fit the format."""
    quotient = amax * torch.tensor(1 / torch.finfo(dtype).max)
    bits = quotient.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    stored = torch.where(quotient.isinf(), 254, exponent + up.int())
    return torch.where(quotient.isnan(), 255, stored).to(torch.uint8)


def powers(stored: Tensor) -> Tensor:
    """The scales of bytes."""
    return torch.exp2(stored.float() - BIAS)


def quantize_side(x: Tensor, dtype: torch.dtype, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Bytes [m, k] and scales ([m, k / 32]; columnwise [m / 32, k]) with their padding of a matrix [m, k]."""
    rows, columns = x.shape
    assert rows % SIDE == 0 and columns % SIDE == 0, f"MXFP8 of a matrix {tuple(x.shape)}"
    tiles = x.view(rows // SIDE, SIDE, columns) if columnwise else x.view(rows, columns // SIDE, SIDE)
    axis = 1 if columnwise else 2
    stored = exponents(tiles.abs().amax(axis), dtype)
    largest = torch.finfo(dtype).max
    data = (tiles / powers(stored).unsqueeze(axis)).clamp(-largest, largest).to(dtype).view(torch.uint8)
    multiples = PADDING[columnwise]
    padded = torch.zeros([-(-n // m) * m for n, m in zip(stored.shape, multiples, strict=True)], dtype=torch.uint8)
    padded[: stored.shape[0], : stored.shape[1]] = stored
    return data.view(rows, columns), padded


def quantize_both(x: Tensor, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a quantized tensor, of the sides that are asked for."""
    flat = x.float().reshape(-1, x.shape[-1])
    fields: dict[str, Any] = {"with_gemm_swizzled_scales": False}
    for side, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        data, scales = quantize_side(flat, dtype, side == "columnwise") if used else (None, None)
        fields |= {f"{side}_data": None if data is None else data.view(x.shape), f"{side}_scale_inv": scales}
    return fields


def values(operand: Any, dtype: torch.dtype, columnwise: bool) -> Tensor:
    """The matrix [m, k] in float32 of one side of a quantized tensor."""
    side = "columnwise" if columnwise else "rowwise"
    data, stored = getattr(operand, f"_{side}_data"), getattr(operand, f"_{side}_scale_inv")
    assert data is not None, f"{side} data of an MXFP8 tensor were not made"
    assert not operand._with_gemm_swizzled_scales, "scales in the order of a GPU's products"
    flat = data.reshape(-1, data.shape[-1])
    scales = powers(stored).repeat_interleave(SIDE, 0 if columnwise else 1)
    return flat.view(dtype).float() * scales[: flat.shape[0], : flat.shape[1]]
