"""Splits the wall time of each step into waiting for data, the source's own work, and training."""

from __future__ import annotations

import time
from dataclasses import replace

from megaswift.trainers.hook import Hook, Run, StepRecord


class StepTimer(Hook):
    """The first hook of a run: it completes the record of a step before the others read it."""

    def __init__(self) -> None:
        self.began = 0.0
        self.asked = 0.0
        self.waited = 0.0

    def on_step_begin(self, run: Run) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_batch_begin(self, run: Run) -> None:
        """A wait begins: in a step may be one for its own batch and one for the next step's."""
        self.asked = time.perf_counter()

    def on_batch(self, run: Run) -> None:
        """The wait ends."""
        self.waited += time.perf_counter() - self.asked

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Seconds of the step, and of each part of the run."""
        extras = step.extras
        step.seconds = time.perf_counter() - self.began
        step.data_wait = self.waited - extras.waiting
        self.waited = 0.0
        training = step.seconds - step.data_wait - sum(extras.seconds.values())
        if extras.training:
            step.result = replace(step.result, metrics={**step.result.metrics, extras.training: training})
        for part, seconds in {"waiting for data": step.data_wait, "training steps": training, **extras.seconds}.items():
            run.seconds[part] = run.seconds.get(part, 0.0) + seconds
