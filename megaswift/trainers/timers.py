"""Wall time by part of a run, as the report and the metrics tell it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the block's wall time to this part of `seconds`, also when the block fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began


class StepTimer:
    """Splits the wall time of a step into waiting for data, the source's own work, and training."""

    def __init__(self, parts: dict[str, float]) -> None:
        self.parts = parts
        """Seconds by part of the run, to which each step adds."""
        self.began = self.waited = 0.0

    def start(self) -> None:
        """Before the batch is asked for."""
        self.began = time.perf_counter()

    def data_ready(self) -> None:
        """The batch is there."""
        self.waited = time.perf_counter() - self.began

    def stop(self, own: Mapping[str, float], within_wait: float) -> tuple[float, float, float]:
        """Seconds of the whole step, of waiting and of training.

        `own`: the source's work by part, of which `within_wait` was spent before `data_ready`.
        """
        whole, waiting = time.perf_counter() - self.began, self.waited - within_wait
        training = whole - waiting - sum(own.values())
        for part, seconds in {"waiting for data": waiting, "training steps": training}.items():
            self.add(part, seconds)
        for part, seconds in own.items():
            self.add(part, seconds)
        return whole, waiting, training

    def add(self, part: str, seconds: float) -> None:
        """Adds to the time of a part of the run."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds
