"""Wall time by part of a run, for the report and the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megaswift.trainers.hook import Hook, StepRecord

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the block's wall time to this part of `seconds`, also when the block fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began


class StepTimer(Hook):
    """Splits the wall time of each step into waiting for data, the source's own work, and training. The first hook of a
    loop: it completes the record of the step before the others read it."""

    def __init__(self) -> None:
        self.began = self.asked = self.waited = 0.0

    def on_step_begin(self, loop: Loop) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_batch_begin(self, loop: Loop) -> None:
        """A wait begins: in a step may be one for its own batch and one for the next step's."""
        self.asked = time.perf_counter()

    def on_batch(self, loop: Loop) -> None:
        """The wait ends."""
        self.waited += time.perf_counter() - self.asked

    def on_step(self, loop: Loop, step: StepRecord) -> None:
        """Seconds of the step, and of each part of the run."""
        extras = step.extras
        step.seconds, step.data_wait = time.perf_counter() - self.began, self.waited - extras.waiting
        self.waited = 0.0
        training = step.seconds - step.data_wait - sum(extras.seconds.values())
        if extras.training:
            step.result = replace(step.result, metrics={**step.result.metrics, extras.training: training})
        for part, seconds in {"waiting for data": step.data_wait, "training steps": training, **extras.seconds}.items():
            loop.seconds[part] = loop.seconds.get(part, 0.0) + seconds
