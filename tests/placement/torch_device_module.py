"""What torch asks of the stand-in device by name (`torch.privateuseone`): its number, streams and events."""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.placement.device import DEVICE


def register() -> None:
    """The module of the stand-in's device type; FSDP2 and device meshes look for it."""
    from megaswift.engine.megatron.cpu import cuda_stubs

    module: Any = types.ModuleType(f"torch.{DEVICE.type}")
    module.Stream, module.Event, module.stream = cuda_stubs.Stream, cuda_stubs.Event, cuda_stubs.stream_context
    module.current_stream = lambda *_: cuda_stubs.Stream()
    module.current_device = lambda: DEVICE.index
    module.device_count = lambda: 1
    module.is_available = module.is_initialized = lambda: True
    module.set_device = cuda_stubs.no_op
    torch._register_device_module(DEVICE.type, module)
