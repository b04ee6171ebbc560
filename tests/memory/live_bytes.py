"""Bytes of the tensors that exist during a run, between operations: what kernels and collectives take for themselves is
left out, and with them what stands in for these on a CPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

COLLECTIVES = ("/megaswift/engine/megatron/cpu/collectives.py", "/megaswift/engine/megatron/cpu/shared_memory.py")
"""Files of collectives on a CPU, whose tensors are not counted: results lie in those of the caller."""
KERNELS = ("/tests/te/",)
"""Folders of stand-ins for kernels: what they hold before they return is not counted."""


class LiveBytes(TorchDispatchMode):
    """Counts the storages of new tensors; those of `held` are there before."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.held = {t.untyped_storage().data_ptr() for t in held}
        self.sizes: dict[int, int] = {}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts what it returns."""
        out = func(*args, **(kwargs or {}))
        new = [t for t in tree_iter(out) if isinstance(t, Tensor) and self._is_new(t.untyped_storage().data_ptr())]
        if new and not _inside(COLLECTIVES):
            for tensor in new:
                self._add(tensor.untyped_storage())
        if self.live > self.peak and not _inside(KERNELS):
            self.peak = self.live
        return out

    def _is_new(self, place: int) -> bool:
        return bool(place) and place not in self.held and place not in self.sizes

    def _add(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if not self._is_new(place):
            return
        self.sizes[place] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._free, place)

    def _free(self, place: int) -> None:
        self.live -= self.sizes.pop(place, 0)


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields weights, buffers and gradients of a model."""
    yield from module.buffers()
    for parameter in module.parameters():
        yield parameter
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None:
            yield gradient


def _inside(places: tuple[str, ...]) -> bool:
    """Whether a function of these files or folders is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in places):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
