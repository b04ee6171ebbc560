"""How long a rank's own forward and backward passes take, before it waits for the other data-parallel ranks.

A synchronous step takes the same wall time on every rank. What differs is the time between the start of a pass and the
moment at which its last operation is done and the gradients could be reduced. Waits inside a pass (tensor, context and
expert parallelism; weights that FSDP2 and ZeRO-3 gather) are part of it: a slow rank shows with its group there. Waits
between the passes (a pipeline's sends and receives) and the reduction of gradients are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable


class OwnComputeClock:
    """Hooks on the outermost modules of a rank's model. Passes without gradients are not timed.

    `backward`: False where gradients are reduced inside of the backward pass, which then waits for the slowest rank.
    """

    def __init__(self, modules: Iterable[nn.Module], backward: bool = True) -> None:
        self._backward = backward
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None
        for module in modules:
            module.register_forward_pre_hook(self._forward_begins, prepend=True)
            module.register_forward_hook(self._forward_ends, prepend=True)

    def take(self) -> float:
        """Return the seconds of compute since the last call; on a GPU this waits until the passes are done."""
        spans = self._spans
        self._spans = []
        return sum(_seconds(began, ended) for began, ended in spans)

    def _forward_begins(self, *_: Any) -> None:
        self._began = _now() if torch.is_grad_enabled() else None

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._began is None:
            return
        self._spans.append((self._began, _now()))
        self._began = None
        if self._backward and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        began = _now()
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: self._spans.append((began, _now())))  # before those of DDP, which wait


def _now() -> Any:
    """A point on this rank's stream, or of the clock on a CPU."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
