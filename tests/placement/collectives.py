"""Collectives and explicit synchronizations under the stand-in device.

Owns what NCCL and gloo accept (tensors of the device, tensors in host memory), and which of their calls wait. They run
over gloo, whose own steps are the network's affair and are not looked at.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.placement.device import GLOO, OURS, READ, SYNC, StandIn, WrongDevice, paused

TENSORS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
MESSAGES = ("isend", "irecv")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")
"""Over NCCL they end with a read of the device."""
SIZES = ("output_split_sizes", "input_split_sizes")


def _group(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
    arguments = signature.bind(*args, **kwargs).arguments
    return arguments, arguments.get("group")


def _of_tensors(stand_in: StandIn, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        from megaswift.distributed import cpu_group

        arguments, group = _group(signature, args, kwargs)
        sizes = [arguments.get(key) for key in SIZES]
        if any(isinstance(size, Tensor) and stand_in.holds(size) for size in sizes):
            stand_in.wait(READ)
        sent = {k: v for k, v in arguments.items() if k not in SIZES}
        held = [stand_in.holds(t) for t in tree_leaves(sent) if isinstance(t, Tensor)]
        beside = cpu_group()  # None where one group has both backends
        right = (
            not any(held) if beside is not None and group is beside else all(held) or (beside is None and not any(held))
        )
        if not right and not stand_in.quiet:
            raise WrongDevice(f"{name} of tensors on the wrong device for its group")
        if not any(held):
            stand_in.wait(GLOO)
        with paused(stand_in):
            return function(*args, **kwargs)

    return collective


def _of_objects(stand_in: StandIn, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        from megaswift.distributed import cpu_group

        group, beside = _group(signature, args, kwargs)[1], cpu_group()
        stand_in.wait(GLOO if beside is None or group is beside else READ)
        with paused(stand_in):
            return function(*args, **kwargs)

    return collective


def _of_messages(stand_in: StandIn, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        if not stand_in.quiet and not all(stand_in.holds(op.tensor) for op in p2p_op_list):
            raise WrongDevice("batch_isend_irecv of a tensor in host memory")
        with torch._C.DisableTorchFunction(), paused(stand_in):  # asks for the backend of the tensors' device
            return function(p2p_op_list)

    return batch_isend_irecv


def _of_message(stand_in: StandIn, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One that a rank sends or receives."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def message(*args: Any, **kwargs: Any) -> Any:
        from megaswift.distributed import cpu_group

        arguments, group = _group(signature, args, kwargs)
        held, beside = stand_in.holds(arguments["tensor"]), cpu_group()
        right = not held if beside is not None and group is beside else held or beside is None
        if not right and not stand_in.quiet:
            raise WrongDevice(f"{name} of a tensor in the wrong memory for its group")
        with torch._C.DisableTorchFunction(), paused(stand_in):
            return function(*args, **kwargs)

    return message


def event_class(stand_in: StandIn) -> Any:
    """Events of a device that is as slow as it can be, and runs in order."""

    class Event:
        def record(self, *_: Any) -> None:
            stand_in.recorded += 1
            self.number = stand_in.recorded

        def query(self) -> bool:
            return getattr(self, "number", 0) <= stand_in.reached

        def synchronize(self) -> None:
            before = stand_in.reached
            stand_in.wait(SYNC)
            stand_in.reached = max(before, getattr(self, "number", 0))  # what was recorded later may still run

    return Event


def install(stand_in: StandIn) -> None:
    """The collectives of torch.distributed, also where modules have bound them, and CUDA's synchronizations."""
    from megaswift.engine.megatron.cpu import cuda_stubs

    made: dict[Any, Any] = {}
    for name in TENSORS:
        made[getattr(dist, name)] = _of_tensors(stand_in, name, getattr(dist, name))
    for name in OBJECTS:
        made[getattr(dist, name)] = _of_objects(stand_in, getattr(dist, name))
    for name in MESSAGES:
        made[getattr(dist, name)] = _of_message(stand_in, name, getattr(dist, name))
        setattr(dist.distributed_c10d, name, made[getattr(dist, name)])  # a P2POp takes this one only
    made[dist.batch_isend_irecv] = _of_messages(stand_in, dist.batch_isend_irecv)
    for module in [m for k, m in sys.modules.items() if k == "torch.distributed" or k.startswith(OURS)]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in made:
                setattr(module, name, made[value])
    torch.cuda.synchronize = stand_in.synchronized
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assignment]
    cuda_stubs.Stream.synchronize = lambda self: stand_in.synchronized()  # type: ignore[method-assign]
    for name in ("record", "query", "synchronize"):
        setattr(cuda_stubs.Event, name, getattr(event_class(stand_in), name))
