"""When a hook that works at intervals is due: every N steps, or at the step that completes an epoch.

Owns the count of epochs, which travels in checkpoints. What is done at these steps is the hooks' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

from megaswift.trainers.hook import Run, StepRecord

EPOCH = "epoch"
BEST = "best"
NO = "no"
Every = int | float | str | None
"""Steps, a fraction of all steps, `epoch`, or what never falls due by itself: `best`, `no`, None."""


def interval_of(strategy: str | None, steps: int | float | None) -> Every:
    """The interval that a strategy and a number of steps name together."""
    return steps if strategy in (None, "steps") else strategy


def steps_of(steps: float, total_steps: int) -> int:
    """An interval in steps; below 1 it is a fraction of all steps, rounded up (as transformers does)."""
    return ceil(total_steps * steps) if steps < 1 else int(steps)


class StepInterval:
    """An interval and where it stands."""

    def __init__(self, every: Every) -> None:
        self.every = every
        self.epochs: int | None = None
        """Epochs that are complete; None before the run starts."""

    def start(self, run: Run) -> None:
        """At the first step, or the step of the checkpoint."""
        if isinstance(self.every, float):
            self.every = steps_of(self.every, run.total_steps)
        if self.epochs is None:
            self.epochs = floor(run.data.epoch)

    def due(self, step: StepRecord) -> bool:
        """Whether this step is one of the interval's. Asked once a step.

        A global batch may go on into the next epoch: the step that takes an epoch's last row completes it.
        """
        before = self.epochs or 0
        self.epochs = max(self.epochs or 0, floor(step.epoch))
        if self.every == EPOCH:
            return self.epochs > before
        return isinstance(self.every, int) and step.number % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """The count, where it matters."""
        return {"epochs": self.epochs} if self.every == EPOCH else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.epochs = None if state.get("epochs") is None else int(state["epochs"])
