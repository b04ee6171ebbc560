"""Builds models on the meta device: adapters are added and parameters sharded before any weight is read.

As with the meta device, a parameter has a shape and a dtype only: its storage is one zero (all strides are 0). It is a
CPU tensor all the same, because PEFT moves what it adds to the device of the layer that it is added to. Memory is
allocated just before a parameter is sharded, and is not touched, so that on a CPU no page of it is resident.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules made inside have parameters on the meta device, which costs nothing; their buffers are real.

    Torch's hook is of the whole process, so modules that another thread makes meanwhile are left alone.
    """
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        """A new parameter, or None for the same: a tied one is registered twice."""
        if parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def meta_parameters_to_expanded_zeros(module: nn.Module) -> None:
    """Replaces parameters on the meta device by expanded zeros on the CPU; tied parameters stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = nn.Parameter(_expanded_zeros(parameter, "cpu"), parameter.requires_grad)
                part._parameters[name] = parameters.setdefault(id(parameter), empty)


def _expanded_zeros(like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return zeros of a tensor's shape and dtype over a single one; of one element, which needs no more memory, with
    strides as any other tensor, because DeepSpeed views it as bytes."""
    zero = torch.zeros((), dtype=like.dtype, device=device)
    return zero.view(like.shape) if like.numel() == 1 else zero.expand(like.shape)


def swap_parameters_for_expanded_zeros(module: nn.Module) -> dict[str, torch.Tensor]:
    """Drops the storage of a module's parameters; returns them by name, to be filled in again later."""
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[name] = parameter.data
        parameter.data = _expanded_zeros(parameter, parameter.device)
    return tensors


def is_unallocated(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a shape but no storage of that size: all its strides are 0."""
    return parameter.numel() > 1 and not any(parameter.stride())


def allocate_storage(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Allocates uninitialized storage on `device` for those that have none."""
    for parameter in parameters:
        if is_unallocated(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
