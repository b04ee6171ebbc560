"""A rank of a loop over a tiny engine, with the reduction of counts over ranks: what one meets ends the run of all."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import torch

from megaswift.engine.global_batch_loss_and_metrics import count_global_batch
from megaswift.errors import DataError, Problem
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.hook import Hook
from tests.trainers.tiny import tiny_loop

UNUSABLE, SIGNAL = "unusable row", "signal"


def go(rank: int, world: int, what: str) -> tuple[int, int, int, str, list[int]]:
    """(step, signal, position of the source, error, squares of each step); rank 1 meets `what` in its third step."""
    from megaswift.engine.start_default_process_group import init_default_and_gloo_process_groups

    init_default_and_gloo_process_groups("gloo", 60)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(dp=world, tp=1, pp=1, cp=1, world_size=world),
        coordinates=SimpleNamespace(tp=0, pp=0, cp=0),
        device=torch.device("cpu"),
    )
    squares: list[int] = []

    class Watch(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            squares.append(step.squares)

    loop = tiny_loop(9, Watch())
    loop.engine.layout = context.layout
    loop.engine.count = lambda batches, loss, beside=(): count_global_batch(batches, loss, context, beside)
    following = loop.source.next

    def third() -> Any:
        batches = following()
        if rank == 1 and loop.step == 2:
            if what == UNUSABLE:
                raise DataError(Problem("row 7", "is not usable"))
            os.kill(os.getpid(), signal.SIGTERM)
        return batches

    loop.source.next = third
    error = ""
    try:
        loop.run()
    except DataError as failure:
        error = str(failure)
    return loop.step, loop.interrupted, loop.source.position, error, squares


def count(rank: int, world: int, payload: None) -> Any:
    """The counts of a grid of two data-parallel by two tensor-parallel ranks; rank 3 passes no micro-batches."""
    from megaswift.engine.start_default_process_group import init_default_and_gloo_process_groups
    from tests.trainers.tiny import batch

    init_default_and_gloo_process_groups("gloo", 60)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(world_size=world),
        coordinates=SimpleNamespace(tp=rank % 2, pp=0, cp=0),
        device=torch.device("cpu"),
    )
    batches = [] if rank == 3 else [batch(6 + rank // 2, 3), batch(5, 2)]
    return count_global_batch(batches, CrossEntropy(), context, [rank, rank == 3])
