"""FP8: casts by a scale per tensor or per block, the histories of delayed scaling, and operands of matrix products.

The bytes are torch's float8 values. A cast multiplies in float32, saturates and rounds to the nearest even value, as
the compiled kernels do. The blocks of MXFP8 are in mxfp8_blocks.py; FP4 is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.te import mxfp8_blocks
from tests.te.registry import DType, kernel, python_function, torch_dtype

FLOAT8 = {DType["kFloat8E4M3"]: torch.float8_e4m3fn, DType["kFloat8E5M2"]: torch.float8_e5m2}
BLOCK = 128
"""Elements of a block's side."""
TENSORS = "transformer_engine.pytorch.tensor."
KINDS = {
    "Float8BlockQuantizer": "blocks",
    "Float8Quantizer": "tensor",
    "Float8CurrentScalingQuantizer": "tensor",
    "MXFP8Quantizer": "mxfp8",
}
"""Transformer Engine's quantizer -> what it makes."""


@python_function("transformer_engine.pytorch.quantization:check_fp8_block_scaling_support")
def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """As with CUDA 12.9."""
    return True, ""


def float8(dtype: Any) -> torch.dtype:
    """torch's dtype of an FP8 format."""
    return FLOAT8[DType(int(dtype))]


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float) -> Tensor:
    """The factor that takes `amax` to the format's largest value; 1 where `amax` is 0 or not finite."""
    amax = amax.clamp_min(epsilon)
    largest = torch.tensor(torch.finfo(dtype).max)  # torch multiplies a number by the inverse, which rounds twice
    scale = torch.where(amax.isfinite() & (amax > 0), largest / amax, 1.0)
    scale = scale.clamp_max(torch.finfo(torch.float32).max)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of x * scale."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)


def _padded(x: Tensor) -> Tensor:
    """Zeros up to whole blocks in both directions."""
    rows, columns = ((-n) % BLOCK for n in x.shape)
    return torch.nn.functional.pad(x, (0, columns, 0, rows))


def _blocks(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Bytes [m, k] and inverse scales, as the product reads them: [k / 128, m] of rows' blocks, [m / 128, k / 128] of
    squares."""
    rows, columns = x.shape
    dtype, wide = float8(quantizer.dtype), _padded(x)
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    tiles = wide.view(wide.shape[0] // height, height, wide.shape[1] // BLOCK, BLOCK)
    scale = scale_of(tiles.abs().amax((1, 3)), dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = cast(tiles, scale[:, None, :, None], dtype).view(wide.shape)[:rows, :columns].contiguous()
    inverse = 1 / scale
    return data, inverse if height == BLOCK else inverse[:rows].t().contiguous()


def _write_scales(x: Tensor, quantizer: Any, shape: Any, columnwise: bool) -> Tensor:
    """Inverse scales in the shape that Transformer Engine asks for, whose last axis is a multiple of 4."""
    stored = torch.zeros(quantizer.get_scale_shape(shape, columnwise))
    stored[:, : x.shape[1]] = x
    return stored


def _quantize_blocks(x: Tensor, quantizer: Any) -> dict[str, Any]:
    flat = x.float().reshape(-1, x.shape[-1])
    fields: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if quantizer.rowwise_usage:
        data, inverse = _blocks(flat, quantizer)
        fields["rowwise_data"] = data.view(x.shape)
        fields["rowwise_scale_inv"] = _write_scales(inverse, quantizer, x.shape, False)
    if quantizer.columnwise_usage:
        data, inverse = _blocks(flat.t(), quantizer)
        fields["columnwise_data"] = data.view(x.shape[-1], *x.shape[:-1])
        fields["columnwise_scale_inv"] = _write_scales(inverse, quantizer, x.shape, True)
    return {**fields, "is_2D_scaled": quantizer.block_scaling_dim == 2}


def _tensor_scale(wide: Tensor, quantizer: Any) -> Tensor:
    """The scale of a whole tensor: the quantizer's under delayed scaling, else of these values."""
    assert not getattr(quantizer, "use_existing_amax", False), "the test device computes magnitudes itself"
    amax = wide.abs().max() if wide.numel() else torch.zeros(())
    if type(quantizer).__name__ == "Float8Quantizer":
        if quantizer.amax.numel():  # empty: a cast by a scale that is not of this tensor's history
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        return quantizer.scale
    amax = amax.reshape(1)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return scale_of(amax, float8(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)


def _quantize_tensor(x: Tensor, quantizer: Any, scale: Tensor) -> dict[str, Any]:
    scale = scale.reshape(1)
    data = cast(x.float(), scale, float8(quantizer.dtype))
    return {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": 1 / scale,
    }


def _new(quantizer: Any, x: Tensor, kind: str, fields: dict[str, Any]) -> Any:
    """A quantized tensor, or its storage alone inside a module."""
    module, name = {
        "blocks": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
        "tensor": ("float8_tensor", "Float8Tensor"),
        "mxfp8": ("mxfp8_tensor", "MXFP8Tensor"),
    }[kind]
    owner = importlib.import_module(
        TENSORS + ("storage." if quantizer.internal else "") + module + "_storage" * quantizer.internal
    )
    fields = {**fields, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return getattr(owner, name + "Storage")(**fields)
    return getattr(owner, name)(shape=x.shape, dtype=x.dtype, **fields)


def _quantize(x: Tensor, quantizer: Any, scale: Tensor | None) -> dict[str, Any]:
    """The fields of a quantized tensor; `scale`: of one that has one."""
    kind = KINDS[type(quantizer).__name__]
    if kind == "mxfp8":
        return mxfp8_blocks.quantize_both(x, quantizer, float8(quantizer.dtype))
    return _quantize_blocks(x, quantizer) if scale is None else _quantize_tensor(x, quantizer, scale)


@kernel
def create_empty_quantized_tensor(quantizer: Any, shape: list[int], dtype: Any, device: Any, pin_memory: bool) -> Any:
    """A tensor as the quantizer makes it, whose values are not set."""
    x, kind = torch.zeros(shape, dtype=dtype), KINDS[type(quantizer).__name__]
    return _new(quantizer, x, kind, _quantize(x, quantizer, torch.ones(1) if kind == "tensor" else None))


@kernel
def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Tensor | None = None) -> Any:
    """`x` as the quantizer makes it, in `out` where that is given; nothing happens where `noop` is set."""
    if out is not None and noop is not None and bool(noop.reshape(-1)[0] != 0):
        return out
    x = x.detach().contiguous()
    kind = KINDS[type(quantizer).__name__]
    fields = _quantize(x, quantizer, _tensor_scale(x.float(), quantizer) if kind == "tensor" else None)
    if out is None:
        return _new(quantizer, x, kind, fields)
    names = {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            place = getattr(out, names.get(name, f"_{name}"), None)
            if place is None:
                setattr(out, names.get(name, f"_{name}"), value)
            else:
                place.copy_(value.view(place.shape))
        elif value is None:  # what is not asked for is dropped, or it would be of the values before
            setattr(out, names.get(name, f"_{name}"), None)
    if kind == "mxfp8":
        out._with_gemm_swizzled_scales = False
    if kind == "tensor":
        out._transpose_invalid = fields["data_transpose"] is None
    return out


@kernel
def split_quantize(
    x: Tensor, splits: Sequence[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Each group of rows by its quantizer."""
    return [quantize(part, q) for part, q in zip(x.split(list(splits)), quantizers, strict=True)]


@kernel
def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(the sum over rows, the quantized gradient)."""
    return grad.float().reshape(-1, grad.shape[-1]).sum(0).to(grad.dtype), quantize(grad, quantizer)


@kernel
def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """[k, ...] of bytes [..., k]."""
    turned = data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


@kernel
def dequantize(x: Any, dtype: Any) -> Tensor:
    """The values of a tensor with one scale, or of MXFP8."""
    if _is_mxfp8(x):
        return mxfp8_blocks.values(x, float8(x._fp8_dtype), False).view(x.size()).to(torch_dtype(dtype))
    return (x._data.view(float8(x._fp8_dtype)).float() * x._scale_inv).to(torch_dtype(dtype))


@kernel
def compute_amax(x: Tensor, amax: Tensor) -> None:
    """The largest magnitude, into `amax`."""
    amax.copy_(x.float().abs().max().view_as(amax))


@kernel
def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """The end of a step of delayed scaling: the newest magnitudes enter the histories [length, n], and scales follow
    from the largest of a history, or from the newest."""
    largest, start = torch.tensor(torch.finfo(float8(dtype)).max), 0
    for history, scale in zip(histories, scales, strict=True):
        newest = reduced[start : start + scale.numel()]
        start += scale.numel()
        history[0] = torch.where(newest != 0, newest, history[0])
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
        usable = amax.isfinite() & (amax > 0)
        wanted = (largest / amax / 2**margin).clamp_max(torch.finfo(torch.float32).max)
        scale.copy_(torch.where(usable, wanted, scale))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


def _unblocked(data: Tensor, inverse: Tensor, dtype: torch.dtype, square: bool) -> Tensor:
    """[m, k] in float32 of bytes and inverse scales."""
    flat = data.reshape(-1, data.shape[-1])
    rows, columns = flat.shape
    factors = inverse if square else inverse.t()
    if square:
        factors = factors.repeat_interleave(BLOCK, 0)
    factors = factors.repeat_interleave(BLOCK, 1)[:rows, :columns]
    return flat.view(dtype).float() * factors


def _is_mxfp8(operand: Any) -> bool:
    return hasattr(operand, "_with_gemm_swizzled_scales") and "MXFP8" in type(operand).__name__


def matrix(operand: Any, columnwise: bool) -> Tensor:
    """An operand of a product as a matrix [m, k] in float32: its rows' bytes, or its columns' where the product sums
    over rows, which must have been made."""
    if type(operand) in (Tensor, torch.nn.Parameter):
        return operand.float().reshape(-1, operand.shape[-1])
    if _is_mxfp8(operand):
        return mxfp8_blocks.values(operand, float8(operand._fp8_dtype), columnwise)
    if hasattr(operand, "_rowwise_data"):
        side = "columnwise" if columnwise else "rowwise"
        data, inverse = getattr(operand, f"_{side}_data"), getattr(operand, f"_{side}_scale_inv")
        assert data is not None, f"a product needs {side} data of a block-scaled operand"
        if columnwise:
            data = data.reshape(data.shape[0], -1)
        values = _unblocked(data, inverse, float8(operand._fp8_dtype), operand._is_2D_scaled)
        return values.t() if columnwise else values
    data = operand._transpose if columnwise else operand._data
    assert data is not None and not (columnwise and operand._transpose_invalid), "an operand's layout was not made"
    values = data.view(float8(operand._fp8_dtype)).float() * operand._scale_inv
    return values.reshape(len(values), -1).t() if columnwise else values.reshape(-1, values.shape[-1])
