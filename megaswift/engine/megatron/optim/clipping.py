"""Clipping and skipping inside the update of the inner optimizers, by numbers that are on the device.

Owns which optimizers can do it, and what their kernels take. `let_device_decide` is called once, when an optimizer is
built; from then on the host learns whether a step was taken after it has launched it (optimizer.py).

The kernels scale gradients while they read them, and write them back scaled. They take a divisor of the gradients
(torch's Adam and SGD) or its inverse (Transformer Engine's FusedAdam), and a flag with which they change nothing.
FusedAdam's kernel that can do it does not take what `--precision_aware_optimizer` stores: that update is our own.
The host decides for updates that run on it (HostAdam), and for optimizers of plugins and Muon: they are any Python
code, which takes neither.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megaswift.engine.megatron.optim.adam_update import count_steps_on_device, update
from megaswift.engine.megatron.optim.host_adam import HostAdam

_SKIP_ON_DEVICE: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Those that `let_device_decide` has accepted."""


def reason_for_host_decision(part: MegatronOptimizer) -> str:
    """Why the host has to know the gradient norm before it launches a part's update; empty where the device decides."""
    inner = part.optimizer
    if part.config.fp8_recipe == "delayed":
        return "delayed scaling: FP8 weights that are quantized again, from the same main weights, get another scale"
    if isinstance(inner, HostAdam):
        return "the update runs on the host"
    if is_fused_by_torch(inner):
        return ""
    return "" if _is_fused_adam(inner) else "its update cannot be skipped on the device"


def is_fused_by_torch(inner: torch.optim.Optimizer) -> bool:
    """Whether torch's own kernel updates all parameters."""
    kinds = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
    return type(inner) in kinds and all(group.get("fused") for group in inner.param_groups)


def _is_fused_adam(inner: torch.optim.Optimizer) -> bool:
    """Whether it is Transformer Engine's, with a kernel that reads all that changes from step to step on the device."""
    own = type(inner).__module__.startswith("transformer_engine.")
    return own and hasattr(inner, "multi_tensor_adam_capturable")


def let_device_decide(parts: Sequence[MegatronOptimizer]) -> None:
    """Before the first step: from now on the device decides, unless the host has to for any of the parts."""
    if any(reason_for_host_decision(part) for part in parts):
        return
    for part in parts:
        inner = part.optimizer
        _SKIP_ON_DEVICE.add(inner)
        if is_fused_by_torch(inner):
            continue
        count_steps_on_device(inner)
        if not part.config.use_precision_aware_optimizer:
            _make_capturable(inner)


def device_decides(parts: Sequence[MegatronOptimizer]) -> bool:
    """Whether every part can be launched before it is known whether the step is taken."""
    return all(part.optimizer in _SKIP_ON_DEVICE for part in parts)


def clips_in_update(part: MegatronOptimizer) -> bool:
    """Whether the update divides gradients by a number of the host."""
    return isinstance(part.optimizer, HostAdam) or is_fused_by_torch(part.optimizer)


@contextmanager
def clipping_by(part: MegatronOptimizer, divisor: float) -> Iterator[None]:
    """The update inside divides gradients by a number above 1; where `clips_in_update`."""
    inner = part.optimizer
    if divisor <= 1:
        yield
        return
    device = next((p.device for group in inner.param_groups for p in group["params"]), torch.device("cpu"))
    on_host = isinstance(inner, HostAdam)
    inner.grad_scale = divisor if on_host else torch.full((), divisor, dtype=torch.float32, device=device)
    try:
        yield
    finally:
        del inner.grad_scale


@contextmanager
def decided_on_device(part: MegatronOptimizer, skip: Tensor, divisor: Tensor | None) -> Iterator[None]:
    """The update inside changes nothing where `skip` [] is 1, and divides gradients by `divisor` [] (float64), as it
    does for torch's GradScaler."""
    inner = part.optimizer
    if is_fused_by_torch(inner):
        _start_momentum(inner)
        given: dict[str, Any] = {"found_inf": skip} | ({} if divisor is None else {"grad_scale": divisor.float()})
    elif part.config.use_precision_aware_optimizer:
        given = {"step": functools.partial(_precision_aware_step, inner, skip, divisor)}
    else:
        inner._dummy_overflow_buf.copy_(skip)  # the step counter follows it, before the kernel's copy is made
        scaler = _FusedAdamGradScaler(skip, torch.ones_like(skip) if divisor is None else divisor)
        given = {"step": functools.partial(inner.step, grad_scaler=scaler)}
    vars(inner).update(given)
    try:
        yield
    finally:
        for name in given:
            delattr(inner, name)


def _start_momentum(inner: torch.optim.Optimizer) -> None:
    """Zeros for SGD's momentum, with which the first step is the same: torch's kernel takes the memory that it makes in
    the first step for momentum in the second one, although it has not written it where the first one was skipped."""
    for group in inner.param_groups if isinstance(inner, torch.optim.SGD) else ():
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and inner.state[p].get("momentum_buffer") is None:
                inner.state[p]["momentum_buffer"] = torch.zeros_like(p)


_precision_aware_step = torch.optim.Optimizer.profile_hook_step(update)
"""With the hooks and the name in profiles that an optimizer's own step has."""


class _FusedAdamGradScaler:
    """What Transformer Engine's FusedAdam asks of a GradScaler."""

    def __init__(self, found_inf: Tensor, scale: Tensor) -> None:
        self._found_inf = found_inf.reshape(1)
        self._scale = scale.reshape(1)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {self._found_inf.device: self._found_inf}

    def _get_scale_async(self) -> Tensor:
        return self._scale


def _make_capturable(inner: torch.optim.Optimizer) -> None:
    """As Transformer Engine's FusedAdam with `capturable=True`, which Megatron-Core does not ask for. The rate, too, is
    on the device."""
    inner.capturable = True  # type: ignore[attr-defined]
    for group in inner.param_groups:
        group["lr"] = torch.full((), float(group["lr"]), dtype=torch.float32, device=group["step"].device)
