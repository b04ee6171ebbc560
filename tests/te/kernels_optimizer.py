"""Multi-tensor functions of the fused optimizer and of gradient clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.te.registry import kernel

HALF = 0x8000
"""Of the unit in a bfloat16's last place, in the bits of its float32."""


def _moved(main: Tensor, grad: Tensor, m: Tensor, v: Tensor, rule: tuple[Any, ...]) -> Tensor:
    """The main weight [n] in float32 after a step of Adam; the moments are updated in place. As adam.cu computes it:
    each operation and each number in float32, the powers of the bias corrections in float64."""
    lr, beta1, beta2, eps, step, mode, correct, decay = (
        float(np.float32(x)) if isinstance(x, float) else x for x in rule
    )
    g = grad.float()
    if mode == 0:
        g = g + decay * main
    first = beta1 * m.float() + (1 - beta1) * g
    second = beta2 * v.float() + (1 - beta2) * g * g
    m.copy_(first), v.copy_(second)
    bias1, bias2 = (float(np.float32(1 - beta**step)) for beta in (beta1, beta2)) if correct else (1.0, 1.0)
    root = (second / bias2).double().sqrt().float()  # rounded to nearest, which torch's float32 is not on every CPU
    update = (first / bias1) / (root + eps)
    return main - lr * (update + decay * main if mode == 1 else update)


@kernel
def multi_tensor_adam(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *rule: Any) -> None:
    """Lists: gradients, weights, moments, and main weights where weights are of a smaller dtype."""
    grads, weights, first, second, *mains = lists
    for i, weight in enumerate(weights):
        main = mains[0][i] if mains else weight
        main.copy_(_moved(main.float(), grads[i], first[i], second[i], rule))
        if mains:
            weight.copy_(main)


@kernel
def multi_tensor_adam_capturable(chunk: int, skip: Tensor, lists: list[list[Tensor]], *rule: Any) -> None:
    """Lists: gradients, weights, moments. Rate, step and the gradients' factor are tensors; gradients are written back
    scaled; nothing happens where `skip` is 1."""
    lr, beta1, beta2, eps, step, mode, correct, decay, factor = rule
    assert lr.dtype == factor.dtype == torch.float32 and step.dtype == skip.dtype == torch.int
    if int(skip) == 1:
        return
    for grad, weight, first, second in zip(*lists, strict=True):
        assert grad.dtype == weight.dtype
        grad.copy_(grad.float() * factor)
        moved = _moved(
            weight.float(), grad, first, second, (float(lr), beta1, beta2, eps, int(step), mode, correct, decay)
        )
        weight.copy_(moved)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The float32 of a bfloat16, rounded to nearest, and the signed 16 bits that it lacks."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def parted(main: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `joined`; a tie rounds up in the bits."""
    bits = main.contiguous().view(torch.int32)
    high = (bits + HALF) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


@kernel
def multi_tensor_adam_param_remainder(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *rule: Any) -> None:
    """Lists: gradients, bfloat16 weights, moments, remainders."""
    for grad, weight, first, second, low in zip(*lists, strict=True):
        high, rest = parted(_moved(joined(weight, low), grad, first, second, rule))
        weight.copy_(high)
        low.copy_(rest)


@kernel
def multi_tensor_scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Lists: sources, destinations."""
    for source, destination in zip(*lists, strict=True):
        destination.copy_(source.float() * scale)


@kernel
def multi_tensor_scale_tensor(chunk: int, overflow: Tensor, lists: list[list[Tensor]], scale: Tensor) -> None:
    """The same with the factor on the device."""
    multi_tensor_scale(chunk, overflow, lists, float(scale))


@kernel
def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(the norm of all [1], of each)."""
    squares = torch.stack([t.double().square().sum() for t in lists[0]])
    return squares.sum().sqrt().float().view(1), squares.sqrt().float() if per_tensor else torch.empty(0)


@kernel
def multi_tensor_unscale_l2norm(
    chunk: int, overflow: Tensor, lists: list[list[Tensor]], inverse: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Norms of gradients times the inverse of the loss scale."""
    return tuple(norm * float(inverse) for norm in multi_tensor_l2norm(chunk, overflow, lists, per_tensor))  # type: ignore[return-value]
