"""Scaled and masked softmax over the last axis, as unfused attention calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import kernel


def _softmax(x: Tensor, scale: Any, hidden: Tensor | None = None) -> Tensor:
    """Softmax of scale x; a row that is hidden whole is 0."""
    scores = x.float() * float(scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0).to(x.dtype)


def _upper(x: Tensor, aligned: bool) -> Tensor:
    """True above the diagonal; `aligned`: of the lower right corner."""
    q, k = x.shape[-2:]
    return torch.ones(q, k, dtype=torch.bool).triu(1 + (k - q if aligned else 0))


def _backward(grad: Tensor, out: Tensor, scale: Any) -> Tensor:
    wide = grad.float() * out.float()
    return ((wide - out.float() * wide.sum(-1, keepdim=True)) * float(scale)).to(grad.dtype)


@kernel
def scaled_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """No mask."""
    return _softmax(x, scale)


@kernel
def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: Any) -> Tensor:
    """True in the mask hides."""
    return _softmax(x, scale, mask)


@kernel
def scaled_upper_triang_masked_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """Causal, as many queries as keys."""
    return _softmax(x, scale, _upper(x, aligned=False))


@kernel
def scaled_aligned_causal_masked_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """Causal, the last query sees every key."""
    return _softmax(x, scale, _upper(x, aligned=True))


@kernel
def scaled_softmax_backward(grad: Tensor, out: Tensor, scale: Any) -> Tensor:
    """The gradient of x."""
    return _backward(grad, out, scale)


@kernel
def scaled_masked_softmax_backward(grad: Tensor, out: Tensor, scale: Any) -> Tensor:
    """The gradient of x; hidden places have out 0."""
    return _backward(grad, out, scale)


@kernel
def scaled_upper_triang_masked_softmax_backward(grad: Tensor, out: Tensor, scale: Any) -> Tensor:
    """The gradient of x."""
    return _backward(grad, out, scale)


@kernel
def scaled_aligned_causal_masked_softmax_backward(grad: Tensor, out: Tensor, scale: Any) -> Tensor:
    """The gradient of x."""
    return _backward(grad, out, scale)
