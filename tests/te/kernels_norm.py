"""RMSNorm and LayerNorm, forward and backward, over the last axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import kernel, torch_dtype


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + (1.0 if zero_centered else 0.0)


def _write(y: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    """The output in its dtype, in its buffer, or quantized."""
    if quantizer is not None:
        y = y.to(torch_dtype(dtype))
        return quantizer(y, out=out) if out is not None else quantizer(y)
    if out is not None:
        return out.copy_(y)
    return y.to(torch_dtype(dtype))


@kernel
def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    """(x / rms(x) weight, -, 1 / rms [rows]), epsilon under the root."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _write(wide * inverse * _scale(weight, zero_centered), out, quantizer, dtype), None, inverse.reshape(-1)


@kernel
def rmsnorm_bwd(dz: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool) -> Any:
    """(dx, dweight)."""
    grad = dz.float().view(x.shape)
    r = inverse.view(*x.shape[:-1], 1)
    normed = x.float() * r
    d = grad * _scale(weight, zero_centered)
    dx = r * (d - normed * (d * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


@kernel
def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:
    """((x - mean) / deviation weight + bias, mean [rows], 1 / deviation [rows])."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * inverse * _scale(weight, zero_centered) + bias.float()
    return _write(y, out, quantizer, dtype), mean.reshape(-1), inverse.reshape(-1)


@kernel
def layernorm_bwd(
    dz: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> Any:
    """(dx, dweight, dbias)."""
    grad, rows = dz.float().view(x.shape), (*x.shape[:-1], 1)
    r = inverse.view(rows)
    normed = (x.float() - mean.view(rows)) * r
    d = grad * _scale(weight, zero_centered)
    dx = r * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    flat = grad.reshape(-1, x.shape[-1])
    dweight = (grad * normed).reshape(flat.shape).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), flat.sum(0).to(weight.dtype)
