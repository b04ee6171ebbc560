"""A rank of a loop over a tiny engine whose checkpoints are due by the clock of rank 0, which no other rank has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megaswift.engine.objective import start_count_global_batch
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hook import Hook, Run
from megaswift.trainers.hooks.checkpoint import CheckpointHook, TimedSaves
from megaswift.trainers.loop import train
from tests.trainers.tiny import tiny_loop

STEPS = 20


class Clock(Hook):
    """A clock that moves only in a step."""

    def __init__(self, seconds_a_step: float) -> None:
        self.now = 0.0
        self.seconds_a_step = seconds_a_step

    def on_step_begin(self, run: Run) -> None:
        self.now += self.seconds_a_step


class Noted(CheckpointHook):
    """Notes the steps that it is to save, and what it has summed up so far; writes nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(CheckpointStore(Path("nowhere")), None, None, {})
        self.timed = TimedSaves(3 << 20, lambda: clock.now)
        self.steps: list[int] = []

    def save(self, run: Run, background: bool = False, by_clock: bool = False) -> None:
        assert self.timed is not None
        self.steps.append(run.step)
        self.saved = run.step
        self.timed.note_save(run.step, by_clock)


def go(rank: int, world: int, slow: int) -> tuple[list[int], int]:
    """The steps that this rank saves, and its number of reductions; steps take 600 s on rank `slow`, elsewhere no
    time."""
    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    init_default_and_gloo_process_groups("gloo", 60)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(dp=world, tp=1, pp=1, cp=1, world_size=world),
        coordinates=SimpleNamespace(tp=0, pp=0, cp=0),
        device=torch.device("cpu"),
    )
    clock = Clock(600.0 if rank == slow else 0.0)
    noted = Noted(clock)
    loop = tiny_loop(STEPS, clock, noted)
    loop.engine.layout = context.layout
    counted = []

    def start_count(batches: Any, loss: Any, further: Any = ()) -> Any:
        counted.append(len(further))
        return start_count_global_batch(batches, loss, context, further)

    loop.engine.start_count = start_count
    train(loop)
    return noted.steps, len(counted)
