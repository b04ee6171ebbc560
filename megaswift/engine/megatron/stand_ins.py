"""What stands in CUDA's and NCCL's place on a CPU: streams that run in order, random states, collectives that gloo lacks.

Owns the objects only; where each one goes, and why, is the table in device.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


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


def nothing(*_: Any, **__: Any) -> None:
    """Nothing to do."""
    return None


def same(self: Any, *_: Any, **__: Any) -> Any:
    """The tensor or module itself: it is where it has to be."""
    return self


def get_rng(*_: Any, **__: Any) -> torch.Tensor:
    """The CPU generator's state."""
    return torch.get_rng_state()


def set_rng(state: torch.Tensor, *_: Any, **__: Any) -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(state)


_all_to_all_single = dist.all_to_all_single
_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter
_coalescing_manager = dist._coalescing_manager


def _sizes(sizes: Any) -> list[int] | None:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def all_to_all(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
                group: Any = None, async_op: bool = False) -> Any:
    """Split sizes as lists of ints, also where tensors are given."""
    return _all_to_all_single(output, input.contiguous(), _sizes(output_split_sizes), _sizes(input_split_sizes), group, async_op)


def gather_uneven(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """all_gather of shards whose first dimensions differ: padded to the longest."""
    rows = [o.shape[0] for o in outputs] if outputs[0].dim() else [1]
    if len(set(rows)) == 1:
        return _all_gather(outputs, tensor.contiguous(), group, async_op)
    longest = max(rows)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    full = [torch.empty_like(padded) for _ in outputs]
    _all_gather(full, padded, group)
    for output, got in zip(outputs, full, strict=True):
        output.copy_(got[: output.shape[0]])
    return None


def reduce_scatter_uneven(output: torch.Tensor, inputs: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
                           async_op: bool = False) -> Any:
    """reduce_scatter of parts whose first dimensions differ: all-reduced, then cut."""
    rows = [i.shape[0] for i in inputs]
    if len(set(rows)) == 1:
        return _reduce_scatter(output, [i.contiguous() for i in inputs], op, group, async_op)
    total = torch.cat(list(inputs))
    dist.all_reduce(total, op, group)
    start = sum(rows[: dist.get_rank(group)])
    output.copy_(total[start : start + output.shape[0]])
    return None


class _Done:
    """The handle of a collective that needed no message."""

    def wait(self) -> None:
        """Done."""


@contextlib.contextmanager
def coalesce(group: Any, async_ops: bool = False, **kwargs: Any) -> Iterator[Any]:
    """Megatron's bundle of collectives; nothing where the group is this rank alone."""
    if group.size() == 1:
        yield _Done()
    else:
        with _coalescing_manager(group, async_ops=async_ops, **kwargs) as manager:
            yield manager


def alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective(output, input, group=...)` that sends nothing where the group is this rank alone."""

    def run(output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is None or group.size() > 1:
            return collective(output, input, *args, group=group, **kwargs)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return _Done()

    return run


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: torch._dynamo refuses one object under two names of torch."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return replaced


def identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that leaves the function as it is."""
    return function
