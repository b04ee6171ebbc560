"""The base class of hooks, which are called at fixed points of the loop, on every rank, in list order.

Owns the base class and the record of one step. Leaves out what hooks do: each has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaswift.engine.protocol import StepResult

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

Line = Mapping[str, Any]
"""One line of metrics.jsonl or eval.jsonl."""


@dataclass(frozen=True)
class StepExtras:
    """What a source of batches adds to the record of the step that they were for."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of its own work (sampling, rewards, ...), by part of the run."""
    waiting: float = 0.0
    """Seconds of it that passed while the loop waited for the micro-batches."""
    training: str = ""
    """Metric for the time of the rest, which is training; empty: none."""


@dataclass
class StepRecord:
    """The record of one optimizer step. `StepTimer`, the first hook, completes it with times."""

    number: int
    """From 1."""
    epoch: float
    learning_rate: float
    result: StepResult
    seconds: float = 0.0
    """Wall time of the whole step, the wait for data included."""
    data_wait: float = 0.0
    """Seconds of it that the loop waited for data; on several ranks for the next step's."""
    squares: int = 0
    """Sum over the global batch's documents of length squared: the attention part of the FLOP rule."""
    extras: StepExtras = field(default_factory=StepExtras)


PLUGIN_HOOKS: dict[str, Callable[[], Hook]] = {}
"""Hooks of every run that `--external_plugins` have registered."""


class Hook:
    """Does nothing; hooks override what they need."""

    part = "logging"
    """Under which name the hook's time stands in the report."""

    busy = False
    """Whether this rank works in the background; `Loop.busy_ranks` counts the ranks that do."""

    def on_start(self, loop: Loop) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_step_begin(self, loop: Loop) -> None:
        """Before each optimizer step."""

    def on_batch_begin(self, loop: Loop) -> None:
        """Before a batch is requested: on several ranks it is the next step's, and `loop.step` does not count the
        present one yet."""

    def on_batch(self, loop: Loop) -> None:
        """The batch is there."""

    def on_launched(self, loop: Loop) -> None:
        """All passes of a step are launched, and the host has not waited for them; `loop.step` does not count it yet.
        May be collective."""

    def on_step(self, loop: Loop, step: StepRecord) -> None:
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
