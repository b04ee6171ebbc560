"""When a run without an option about saving is saved: every half hour, if it expects to last over an hour.

Owns the clock and the estimate, which only rank 0 reads. The loop tells all ranks what rank 0 wants (`SAVE` in
`loop.py`), so that they save after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megaswift.trainers.hook import Run
from megaswift.trainers.options.checkpoint import INTERVAL, KEPT, LONG_RUN


class TimedSaves:
    """Measures a run's steps, and decides when a checkpoint is due."""

    def __init__(self, size: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        """Bytes of a checkpoint; 0 where they are unknown."""
        self.clock = clock
        self.steps: list[int] = []
        """Steps that this run has saved, the newest last; a resumed run goes on with them."""
        self.expected: float | None = None
        """Seconds that the run takes from its first step here, once two steps are measured."""
        self._first = self._began = self._warm = self._saved = 0.0

    def start(self, run: Run) -> None:
        """Start the clock before the first step."""
        self._first = run.step
        self._began = self._saved = self.clock()

    def measure(self, run: Run) -> None:
        """Estimate the length of the run after a step. The first step counts apart: it compiles and allocates."""
        now = self.clock()
        taken = run.step - self._first
        left = run.total_steps - run.step
        if taken == 1:
            self._warm = now
            if now - self._began >= INTERVAL:  # no step compiles that long
                self.expected = (now - self._began) * (1 + left)
        elif taken > 1:
            self.expected = now - self._began + left * (now - self._warm) / (taken - 1)

    def note_save(self, step: int) -> None:
        """Begin the next interval, and note the step among those of this run."""
        self._saved = self.clock()
        self.steps = [*(known for known in self.steps if known < step), step]

    @property
    def is_long(self) -> bool:
        """Whether the run is saved before its end."""
        return self.expected is not None and self.expected > LONG_RUN

    @property
    def due(self) -> bool:
        """Whether a checkpoint should be written after the next step."""
        return self.is_long and self.clock() - self._saved >= INTERVAL

    def surplus(self, step: int) -> list[int]:
        """Return the steps to delete once the checkpoint of `step` is complete."""
        return [known for known in self.steps if known <= step][:-KEPT]
