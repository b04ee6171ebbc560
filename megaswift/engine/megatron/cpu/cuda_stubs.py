"""Stand-ins for CUDA objects on a CPU: streams that run in order, random states, bundles of collectives.

Owns the objects only; where each one goes, and why, is in `patches.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megaswift.engine.squared_norm import sum_of_squares


class Stream:
    """A CUDA stream where there are none: everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has already happened."""
        return event or Event()


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Happened."""

    def wait(self, *_: Any) -> None:
        """Happened."""

    def synchronize(self) -> None:
        """Happened."""

    def query(self) -> bool:
        """Happened."""
        return True


@contextlib.contextmanager
def stream_context(_: Any = None) -> Iterator[None]:
    """A side stream: the same order."""
    yield


def no_op(*_: Any, **__: Any) -> None:
    """Nothing to do."""
    return None


def return_self(self: Any, *_: Any, **__: Any) -> Any:
    """The tensor or module itself: it is where it has to be."""
    return self


def get_cpu_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """The CPU generator's state."""
    return torch.get_rng_state()


def set_cpu_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(state)


class CompletedWork:
    """The handle of a collective that has ended."""

    def wait(self) -> None:
        """Done."""


@contextlib.contextmanager
def coalescing(*_: Any, **__: Any) -> Iterator[CompletedWork]:
    """Megatron's bundle of collectives: each of them has ended when it returns."""
    yield CompletedWork()


def wrap_as_distinct_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: torch._dynamo refuses one object under two names of torch."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return replaced


def identity_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that leaves the function as it is."""
    return function


def multi_tensor_l2_norm(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """(norm of all tensors together, float32 [1], None), with the signature of apex's `multi_tensor_l2norm`."""
    return sum_of_squares((t for tensors in tensor_lists for t in tensors), "cpu").sqrt().float().reshape(1), None
