"""How often a step copies each tensor of its batches to the device, in the ranks of a pool.

Owns the count by memory: a pinned copy stands for what it was made from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.placement.device import DEVICE
from tests.placement.steps import STAND_IN, _microbatches, engine_of, install


class CopiesToDevice(TorchFunctionMode):
    """Counts them by the storage in host memory that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.origins: dict[int, Tensor] = {}
        """Of pinned copies; all are held, so that no memory is used again."""
        self.held: list[Tensor] = []

    def origin(self, tensor: Tensor) -> int:
        """The storage that a tensor in host memory is, or was pinned from."""
        at = tensor.untyped_storage()._cdata
        return self.origin(self.origins[at]) if at in self.origins else at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        known = isinstance(first, Tensor) and not STAND_IN.holds(first)
        made = func(*args, **kwargs)
        if known and isinstance(made, Tensor):
            if name == "pin_memory":
                self.origins[made.untyped_storage()._cdata] = first
                self.held += [first, made]
            elif name in ("to", "cuda") and STAND_IN.holds(made):
                self.counts[self.origin(first)] = self.counts.get(self.origin(first), 0) + 1
                self.held += [first, made]
            elif name == "copy_" and STAND_IN.holds(made):
                raise AssertionError("copy_ onto the device is not counted")
        return made


def measure(rank: int, world: int, payload: tuple[Path, str, bool]) -> tuple[dict[str, int], int]:
    """(how often each tensor of the micro-batches of a step was copied, how many other tensors were); with a fault the
    loss copies the labels once more."""
    from megaswift.losses.sft import CrossEntropy

    folder, text, fault = payload
    install()

    class Again(CrossEntropy):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            source[0].labels.pin_memory().to(DEVICE, non_blocking=True)
            return super().__call__(outputs, batch)

    with engine_of(text, folder) as (engine, case):
        loss = Again() if fault else CrossEntropy()
        source = _microbatches(engine, case, 0)
        engine.train_batch(source, loss, 1e-3)
        source = _microbatches(engine, case, 1)
        with CopiesToDevice() as seen:
            engine.train_batch(engine.prepare_ahead(source), loss, 1e-3)
        tensors = {
            f"{number} {name}": value
            for number, batch in enumerate(source)
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor)
        }
        found = {name: seen.counts.pop(seen.origin(tensor), 0) for name, tensor in tensors.items()}
        return found, sum(seen.counts.values())
