"""What Transformer Engine's modules read as `torch.cuda`: a Hopper GPU, or another on request, whose device is the
CPU."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

HOPPER, BLACKWELL = (9, 0), (10, 0)
CAPABILITY = HOPPER
PROCESSORS = 132


def stand_for(capability: tuple[int, int]) -> None:
    """From here on the GPU has this compute capability, for Transformer Engine and in `torch.cuda`."""
    global CAPABILITY  # noqa: PLW0603 - of the process, as a GPU is
    CAPABILITY = capability
    torch.cuda.get_device_capability = lambda *_: capability  # type: ignore[assignment]
    from transformer_engine.pytorch import quantization, utils

    for module in (quantization, utils):
        for function in vars(module).values():
            if isinstance(function, functools._lru_cache_wrapper):  # what was asked of the GPU before
                function.cache_clear()


class Cuda:
    """Answers what Transformer Engine asks of the device; the rest is torch.cuda's, as megaswift's CPU table leaves
    it."""

    def is_available(self) -> bool:
        """As on a GPU."""
        return True

    def is_initialized(self) -> bool:
        """As on a GPU."""
        return True

    def current_device(self) -> torch.device:
        """Where tensors are made."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One."""
        return 1

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        """Of the GPU that is stood in for."""
        return CAPABILITY

    def get_device_properties(self, *_: Any) -> SimpleNamespace:
        """What cuBLAS' workspace and the recipes look at."""
        return SimpleNamespace(
            major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=PROCESSORS, total_memory=1 << 36
        )

    def synchronize(self, *_: Any) -> None:
        """Nothing runs aside."""

    def is_current_stream_capturing(self) -> bool:
        """No graphs."""
        return False

    def device(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        """There is only one."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)
