"""The update of Transformer Engine's FusedAdam with `--precision_aware_optimizer`, by numbers that are on the device.

Owns the arithmetic and what it reads of FusedAdam's states. FusedAdam has a kernel that reads a flag on the device, and
does nothing where it is set, but that one takes no remainders of main weights, no bfloat16 moments and no gradients of
another dtype than the weights'. The others take numbers of the host and no flag. This update takes all of them: the
operations of `adam.cu` (Transformer Engine 2.x) in their order, in float32. It divides gradients in float32 without
writing them back, and makes no float32 copies of moments. On a GPU it is a Triton kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megaswift.engine.megatron.adam_tensors import AdamRule, AdamTensors, LaunchTables
from megaswift.engine.megatron.optim.bf16_remainders import REMAINDER_DTYPE, join_bf16_remainder, split_rounding_ties_up
from megaswift.engine.triton_support import runs_triton_kernels

_LAUNCH_TABLES: WeakKeyDictionary[torch.optim.Optimizer, dict[int, LaunchTables]] = WeakKeyDictionary()
"""By the number of a group."""


def forget_launch_tables(inner: torch.optim.Optimizer) -> None:
    """Frees what was kept on the device for the next update, which makes it again."""
    _LAUNCH_TABLES.pop(inner, None)


def count_steps_on_device(inner: torch.optim.Optimizer) -> None:
    """Before FusedAdam's first step: a counter of steps taken on the device for each group, from 0, because FusedAdam
    would count a first step that is skipped."""
    device = inner._dummy_overflow_buf.device  # type: ignore[attr-defined]
    for group in inner.param_groups:
        group["step"] = torch.zeros(1, dtype=torch.int, device=device)


@torch.no_grad()
def update(inner: Any, skip: Tensor, divisor: Tensor | None) -> None:
    """A step of FusedAdam `inner`, which changes nothing where `skip` [] is 1. Gradients are divided by `divisor` []
    (float64)."""
    assert inner.adam_w_mode == 1, "weight decay apart from the gradient"
    factor = torch.ones_like(skip) if divisor is None else divisor.double().reciprocal()
    tables = _LAUNCH_TABLES.setdefault(inner, {})
    for number, group in enumerate(inner.param_groups):
        group["step"] += (skip == 0).int()
        rule = AdamRule(*map(_float32, (group["lr"], *group["betas"], group["eps"], group["weight_decay"])))
        step = group["step"].reshape(())
        corrections = [1 - torch.pow(beta, step.double()) for beta in (rule.beta1, rule.beta2)]
        numbers = torch.stack([x.float() for x in (skip, factor, *corrections)])
        parameters = list(_parameters(inner, group))
        if parameters and runs_triton_kernels(numbers):
            kernels = importlib.import_module("megaswift.engine.megatron.optim.adam_update_triton")
            kernels.update_by_triton(parameters, numbers, rule, tables.setdefault(number, {}))
            continue
        for p in parameters:
            update_by_torch(p, numbers, rule)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _parameters(inner: Any, group: dict[str, Any]) -> Iterator[AdamTensors]:
    for p in group["params"]:
        initialize_fused_adam_state(inner, p)
        gradient = getattr(p, "decoupled_grad", None) if inner.use_decoupled_grad else p.grad
        if gradient is None:
            continue
        state = inner.state[p]
        main = state.get("master_param") if p.dtype != torch.float32 else None
        yield AdamTensors(gradient.detach(), p.detach(), main, state["exp_avg"], state["exp_avg_sq"])


def initialize_fused_adam_state(inner: Any, p: Tensor) -> None:
    """A parameter's states, where it has none. Megatron-Core's `init_state_fn` calls `initialize_state(p)`, and
    Transformer Engine from 2.1 on also asks whether main weights are kept as remainders."""
    if inner.state[p]:
        return
    asks = "store_param_remainders" in inspect.signature(inner.initialize_state).parameters
    remainders = getattr(inner, "store_param_remainders", False) and p.dtype == torch.bfloat16
    inner.initialize_state(p, remainders) if asks else inner.initialize_state(p)


def update_by_torch(p: AdamTensors, numbers: Tensor, rule: AdamRule) -> None:
    """One parameter's update in place; `numbers` [4]: skip, factor of gradients, bias corrections."""
    lr, beta1, beta2, epsilon, decay = rule
    skip, factor, bias1, bias2 = numbers.unbind()
    remainders = p.main is not None and p.main.dtype == REMAINDER_DTYPE
    if p.main is not None and remainders:
        weight = join_bf16_remainder(p.weight, p.main)
    else:
        weight = (p.weight if p.main is None else p.main).float()
    gradient = p.gradient.float() * factor
    first = beta1 * p.first.float() + (1 - beta1) * gradient
    second = beta2 * p.second.float() + (1 - beta2) * gradient * gradient
    root = (second / bias2).double().sqrt().float()  # rounded to nearest, which torch's float32 is not on every CPU
    change = (first / bias1) / (root + epsilon)
    weight = weight - lr * (change + decay * weight)
    changed = [(p.first, first), (p.second, second)]
    if p.main is None:
        changed += [(p.weight, weight)]
    else:
        changed += zip(
            (p.weight, p.main), split_rounding_ties_up(weight) if remainders else (weight, weight), strict=True
        )
    for held, value in changed:
        held.copy_(torch.where(skip == 0, value.to(held.dtype), held))
