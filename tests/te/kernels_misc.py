"""Conversions between packed and padded rows, padding of experts' rows, and functions that a CPU has no use for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.te import sources
from tests.te.registry import kernel, python_function

UTILS = "transformer_engine.pytorch.utils:"


@python_function("transformer_engine.common:load_framework_extension")
def load_framework_extension(framework: str) -> None:
    """The compiled module is in `sys.modules` already."""


@python_function(UTILS + "canonicalize_device")
def canonicalize_device(device: Any) -> torch.device:
    """All tensors are on one device."""
    return torch.device(sources.DEVICE)


@python_function("transformer_engine.pytorch.distributed:_get_cuda_rng_state")
def _get_cuda_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = True) -> Tensor:
    """The CPU's."""
    return torch.get_rng_state()


@python_function("transformer_engine.pytorch.distributed:_set_cuda_rng_state")
def _set_cuda_rng_state(state: Tensor, device: Any = -1, graph_safe: bool = True) -> None:
    """The CPU's."""
    torch.set_rng_state(state)


@kernel
def convert_thd_to_bshd(t: Tensor, bounds: Tensor, batch: int, length: int) -> Tensor:
    """[b, s, ...], 0 behind each document."""
    out = t.new_zeros(batch, length, *t.shape[1:])
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        out[i, : end - start] = t[start:end]
    return out


@kernel
def convert_bshd_to_thd(t: Tensor, bounds: Tensor, tokens: int) -> Tensor:
    """[tokens, ...]."""
    out = t.new_zeros(tokens, *t.shape[2:])
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        out[start:end] = t[i, : end - start]
    return out


@kernel
def fused_multi_row_padding(inp: Tensor, out: Tensor, rows: list[int], padded: list[int]) -> None:
    """Each group of `rows` followed by zeros up to `padded` rows."""
    for target, source in zip(out.split(list(padded)), inp.split(list(rows)), strict=True):
        target.zero_()
        target[: len(source)] = source


@kernel
def fused_multi_row_unpadding(inp: Tensor, out: Tensor, padded: list[int], rows: list[int]) -> None:
    """The inverse."""
    for source, target in zip(inp.split(list(padded)), out.split(list(rows)), strict=True):
        target.copy_(source[: len(target)])


@kernel
def swap_first_dims(t: Tensor, out: Tensor | None = None) -> Tensor:
    """[b, a, ...] of [a, b, ...], contiguous."""
    swapped = t.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


@kernel
def get_stream_priority_range(*_: Any) -> tuple[int, int]:
    """As on a GPU."""
    return 0, -5


@kernel
def device_supports_multicast(*_: Any) -> bool:
    """As on machines with NVSwitch."""
    return True


@kernel
def ubuf_built_with_mpi() -> bool:
    """As the wheels are built."""
    return False
