"""A rank of a loop over a tiny engine, with the reduction of counts over ranks: what one meets ends the run of all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megaswift.engine.objective import start_count_global_batch
from megaswift.errors import DataError, Problem
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.hook import Hook
from megaswift.trainers.loop import train
from tests.trainers.tiny import tiny_loop

UNUSABLE, SIGNAL, LATE_SIGNAL, STOP, NOTHING = "unusable row", "signal", "late signal", "stop", "nothing"
AT_ONCE = "agree before batch"
STEPS = 5


@dataclass
class Ran:
    """What a rank saw."""

    step: int = 0
    interrupted: int = 0
    source: int = 0
    """Where its source stands at the end."""
    error: str = ""
    squares: list[int] = field(default_factory=list)
    """Of each step."""
    saved: list[tuple[int, float]] = field(default_factory=list)
    """The position that a checkpoint of each step has, and the epoch of its record; the last one's, of the end."""
    asked: list[str] = field(default_factory=list)
    """In which order batches were taken, passes launched, counts waited for and steps read."""
    busy: list[tuple[int, int]] = field(default_factory=list)
    """`busy_ranks` and `busy_after` in each step; rank 0 is busy from step 2 to step 3."""


def go(rank: int, world: int, what: str) -> Ran:
    """A run of `STEPS` steps, of which rank 1 meets `what` with its third batch, or after the counts of that batch."""
    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    init_default_and_gloo_process_groups("gloo", 60)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(dp=world, tp=1, pp=1, cp=1, world_size=world),
        coordinates=SimpleNamespace(tp=0, pp=0, cp=0),
        device=torch.device("cpu"),
    )
    ran = Ran()

    class Watch(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            ran.asked.append(f"step {step.number}")
            ran.squares.append(step.squares)
            ran.saved.append((loop.position["position"], step.epoch))
            ran.busy.append((loop.busy_ranks, loop.busy_after))
            self.busy = rank == 0 and step.number == 2
            if what == STOP and step.number == 2:
                loop.stopping = "enough"

        def on_end(self, loop: Any) -> None:
            ran.saved.append((loop.position["position"], 0.0))

    loop = tiny_loop(STEPS, Watch())
    loop.engine.layout, loop.agree_before_batch = context.layout, what == AT_ONCE
    following = loop.data.next

    def start_count(batches: Any, loss: Any, further: Any = ()) -> Callable[[], Any]:
        wait = start_count_global_batch(batches, loss, context, further)
        number = loop.data.position
        if rank == 1 and number == 3 and what == LATE_SIGNAL:
            os.kill(os.getpid(), signal.SIGTERM)
        return lambda: ran.asked.append(f"counts {number}") or wait()  # type: ignore[func-returns-value]

    def following_batch() -> Any:
        batches = following()
        ran.asked.append(f"batch {loop.data.position}")
        if rank == 1 and loop.data.position == 3:
            if what == UNUSABLE:
                raise DataError(Problem("row 7", "is not usable"))
            if what == SIGNAL:
                os.kill(os.getpid(), signal.SIGTERM)
        return batches

    loop.engine.start_count, loop.data.next = start_count, following_batch
    try:
        train(loop)
    except DataError as failure:
        ran.error = str(failure)
    ran.step, ran.interrupted, ran.source = loop.step, loop.interrupted, loop.data.position
    return ran


def count(rank: int, world: int, payload: None) -> Any:
    """The counts of a grid of two data-parallel by two tensor-parallel ranks; rank 3 passes no micro-batches."""
    from megaswift.engine.process_group import init_default_and_gloo_process_groups
    from tests.trainers.tiny import batch

    init_default_and_gloo_process_groups("gloo", 60)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(world_size=world),
        coordinates=SimpleNamespace(tp=rank % 2, pp=0, cp=0),
        device=torch.device("cpu"),
    )
    batches = [] if rank == 3 else [batch(6 + rank // 2, 3), batch(5, 2)]
    return start_count_global_batch(batches, CrossEntropy(), context, [rank, rank == 3])()
