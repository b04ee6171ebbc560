"""Watches for steps that were not taken because a gradient was not finite: a warning, then a stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaswift.errors import Problem, UserError
from megaswift.trainers.hook import Hook, Step
from megaswift.trainers.progress import warn

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

MOST_IN_A_ROW = 10
"""So many skipped steps one after another end the run: the weights no longer change."""


class Diverged(UserError):
    """The run no longer learns."""

    title = "training was stopped"


class Watch(Hook):
    """Counts skipped steps in a row."""

    def __init__(self, most: int = MOST_IN_A_ROW) -> None:
        self.most = most
        self.in_a_row = 0

    def on_step(self, loop: Loop, step: Step) -> None:
        """Warns, and raises `Diverged` after the last one that is borne."""
        if not step.result.skipped:
            self.in_a_row = 0
            return
        if step.result.loss_scale_falling:
            warn(f"step {step.number} was skipped: a gradient overflows float16; the loss scale is lowered")
            return
        self.in_a_row += 1
        warn(
            f"step {step.number} was skipped: its gradient is not finite (loss {step.result.loss}); {self.in_a_row} "
            f"in a row"
        )
        if self.in_a_row >= self.most:
            raise Diverged(
                Problem(
                    f"step {step.number}",
                    f"{self.in_a_row} steps in a row had a gradient that is not finite",
                    "go on from a checkpoint before it (--resume_from_checkpoint) with a lower --learning_rate or more "
                    "--warmup_steps, or look at the data near it with `megaswift data show`",
                )
            )

    def state_dict(self) -> dict[str, Any]:
        """Steps skipped in a row."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.in_a_row = int(state["in_a_row"])
