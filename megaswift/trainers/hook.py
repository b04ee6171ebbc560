"""What a hook may do: it is called at fixed points of the loop, on every rank, in the order of the list.

Owns the base class and the record of one step. Leaves out what hooks do: each has its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaswift.engine.protocol import StepResult

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

Line = Mapping[str, Any]
"""One line of metrics.jsonl or eval.jsonl."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, as the loop saw it."""

    number: int
    """From 1."""
    epoch: float
    learning_rate: float
    result: StepResult
    seconds: float
    """Wall time of the whole step, the wait for data included."""
    data_wait: float
    """Seconds of it that the loop waited for data."""
    squares: int
    """Sum over this rank's documents of length squared: the attention part of the FLOP rule."""


class Hook:
    """Does nothing; hooks override what they need."""

    part = "logging"
    """Under which name the hook's time stands in the report."""

    def on_start(self, loop: Loop) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_step(self, loop: Loop, step: Step) -> None:
        """After each optimizer step."""

    def on_log(self, loop: Loop, line: Line) -> None:
        """A line of metrics was made (every `logging_steps`)."""

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """An evaluation was done."""

    def on_end(self, loop: Loop) -> None:
        """After the last step, or after an interruption (`loop.interrupted`)."""

    def check_progress(self, loop: Loop) -> None:
        """Where a resumed run has no step left: an error if it has learned nothing."""

    def close(self) -> None:
        """Always called last, after an error too: files and bars are closed here, nothing collective happens."""

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs; plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
