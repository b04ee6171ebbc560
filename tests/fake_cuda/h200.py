"""`torch.cuda` as a machine with one H200 answers it, and NCCL's groups, on a machine without a GPU.

Owns the answers and the random state. Tensors of the device are those that the stand-in of tests/placement marks; its
device is named "cuda" here, so that the product's own branches for CUDA run. Calls that are not listed stay torch's and
fail as they do without CUDA.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.placement import collectives
from tests.placement import device as placement

STAND_IN = placement.StandIn()
CUDA = torch.device("cuda", 0)
MEMORY = 141 * 10**9
"""Bytes."""
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=MEMORY,
    multi_processor_count=132,
    uuid="GPU-stand-in",
    is_integrated=False,
    warp_size=32,
    gcnArchName="",
)
ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "init": None,
    "_lazy_init": None,
    "device_count": 1,
    "current_device": 0,
    "set_device": None,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "get_device_name": PROPERTIES.name,
    "get_arch_list": ["sm_90"],
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "can_device_access_peer": True,
    "empty_cache": None,
    "ipc_collect": None,
    "mem_get_info": (MEMORY, MEMORY),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "reset_peak_memory_stats": None,
    "memory_stats": {},
    "manual_seed_all": None,
}
"""Function -> what it returns whatever it is asked."""


class Event(collectives.event_class(STAND_IN)):  # type: ignore[misc]
    """Of a device that is as slow as it can be."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        """Streams run in order."""

    def synchronize(self) -> None:
        """A wait of the host, unless it has seen something later."""
        if not self.query():
            super().synchronize()

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """All streams are one, in which work runs in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """A wait of the host."""
        STAND_IN.synchronized()

    def record_event(self, event: Any = None) -> Any:
        """An event behind all work so far."""
        event = event or Event()
        event.record()
        return event


def always(value: Any) -> Callable[..., Any]:
    """A function that returns this."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


class GloosGroups:
    """Process groups that are asked for by NCCL's name and are gloo's."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}

    def starting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`init_process_group` or `new_group` with gloo in NCCL's place."""

        def start(*args: Any, **kwargs: Any) -> Any:
            first = [str(args[0]).replace("nccl", "gloo"), *args[1:]] if args and isinstance(args[0], str) else args
            for name in ("pg_options", "device_id"):
                kwargs.pop(name, None)
            asked = kwargs.get("backend") or (args[0] if args and isinstance(args[0], str) else None)
            if isinstance(kwargs.get("backend"), str):
                kwargs["backend"] = "gloo"
            made = function(*first, **kwargs)
            default = self.names.get(None, "nccl")
            self.names[made] = str(asked or default)
            return made

        return start


def install() -> None:
    """Before torch's users ask for the device."""
    placement.DEVICE = CUDA
    cuda: Any = torch.cuda
    for name, value in ANSWERS.items():
        setattr(cuda, name, always(value))
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.device = cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = STAND_IN.synchronized
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = always(None)
    torch.version.cuda = "13.0"
    torch.accelerator.is_available = always(True)  # type: ignore[assignment]
    torch.accelerator.current_accelerator = always(torch.device("cuda"))  # type: ignore[assignment]
    torch.accelerator.current_stream = always(SimpleNamespace(is_capturing=always(False)))  # type: ignore[assignment]
    torch.accelerator.current_device_index = always(0)  # type: ignore[assignment]
    wrap = torch.Tensor._make_wrapper_subclass

    def wrapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = placement.HOST
        return wrap(cls, *args, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(wrapped)  # type: ignore[assignment]
    placement.WRAPPERS["Float8Tensor"] = "_data"
    groups = GloosGroups()
    backend = dist.get_backend
    dist.init_process_group = groups.starting(dist.init_process_group)
    dist.new_group = groups.starting(dist.new_group)
    dist.get_backend = lambda group=None: groups.names.get(group, "nccl" if group is None else backend(group))
    dist.is_nccl_available = always(True)


def mark_in_threads() -> None:
    """Modes of torch belong to a thread: those that prepare batches or write checkpoints get them too."""
    run = threading.Thread.run

    def under_the_stand_in(thread: threading.Thread) -> None:
        with STAND_IN.running():
            run(thread)

    threading.Thread.run = under_the_stand_in  # type: ignore[method-assign]
