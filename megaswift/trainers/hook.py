"""A run as the train loop and its hooks see it, and the base class of hooks.

Hooks are called at fixed points of the loop (`loop.py`), on every rank, in list order. Each hook has its own file in
`hooks/`; those that work at intervals have a `StepInterval`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any, Protocol

from megaswift.engine.protocol import Engine, StartedCount, StepResult
from megaswift.errors import UserError
from megaswift.losses.contract import Batch, Loss
from megaswift.trainers import interrupt

Line = Mapping[str, Any]
"""One line of metrics.jsonl or eval.jsonl."""


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the block's wall time to this part of `seconds`, also when the block fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began


class BatchStream(Protocol):
    """Where the batches come from."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far, as a fraction."""

    @property
    def data_fingerprint(self) -> str:
        """Identifies the data: equal on all ranks, unless they read different files."""

    def next(self) -> list[Batch]:
        """This data-parallel rank's micro-batches of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position."""


Rate = Callable[[int, int], float]
"""(step, counted from 0, of how many) -> learning rate."""
Prepare = Callable[[Engine, list[Batch], bool], list[Batch]]
"""What a task adds to micro-batches that its loss reads; True in training."""


def unchanged(engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
    """Adds nothing."""
    return batches


@dataclass(frozen=True)
class TakenBatch:
    """A global batch that was taken from the source, while its counts are added up over the ranks."""

    microbatches: list[Batch]
    counts: StartedCount
    mistake: UserError | None
    """Why this rank has no micro-batches."""
    epoch: float
    """Passes over the data, this batch included."""
    before: Mapping[str, Any]
    """Position of the source before the batch; empty with `Run.mark`."""
    back: Callable[[], None]
    """Takes the source back to that position."""
    step: int
    """Steps that were taken when signals and busy hooks were asked for."""


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


class Hook:
    """Does nothing; hooks override what they need."""

    part = "logging"
    """Under which name the hook's time stands in the report."""

    busy = False
    """Whether this rank works in the background; `Run.busy_ranks` counts the ranks that do."""

    def on_start(self, run: Run) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_step_begin(self, run: Run) -> None:
        """Before each optimizer step."""

    def on_batch_begin(self, run: Run) -> None:
        """Before a batch is requested: on several ranks it is the next step's, and `run.step` does not count the
        present one yet."""

    def on_batch(self, run: Run) -> None:
        """The batch is there."""

    def on_launched(self, run: Run) -> None:
        """All passes of a step are launched, and the host has not waited for them; `run.step` does not count it yet.
        May be collective."""

    def on_step(self, run: Run, step: StepRecord) -> None:
        """After each optimizer step."""

    def on_log(self, run: Run, line: Line) -> None:
        """A line of metrics was made (every `logging_steps`)."""

    def on_evaluate(self, run: Run, line: Line) -> None:
        """An evaluation was done."""

    def on_end(self, run: Run) -> None:
        """After the last step, or after an interruption (`run.interrupted`)."""

    def check_progress(self, run: Run) -> None:
        """Where a resumed run has no step left: an error if it has learned nothing."""

    def close(self) -> None:
        """Always called last, after an error too: files and bars are closed here, nothing collective happens."""

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs; plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""


PLUGIN_HOOKS: dict[str, Callable[[], Hook]] = {}
"""Hooks of every run that `--external_plugins` have registered."""


@dataclass
class Run:
    """The parts of a run on this rank, and how far it is. `loop.train` takes it from `step` to `total_steps`; both are
    the same on every rank."""

    engine: Engine
    data: BatchStream
    loss: Loss
    learning_rate: Rate
    total_steps: int
    hooks: Sequence[Hook] = ()
    prepare: Prepare = unchanged
    prepare_before_counts: bool = False
    """`prepare` is not collective, and changes what is counted."""
    agree_before_batch: bool = False
    """A batch may take minutes or is made by all ranks together: with a signal on any rank none is asked for, and it is
    taken when its step begins."""
    step_extras: Callable[[], StepExtras] = StepExtras
    mark: Callable[[], Callable[[], None]] | None = None
    """What takes the data back to where they are now, on every rank; None: their `load_state_dict`."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Others that are trained too, by their folder in a checkpoint."""
    weight_decay: Callable[[int, int], float | None] = lambda step, total_steps: None
    """Of a step, as `learning_rate`; None: the configuration's."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the parts, for the report."""

    step: int = 0
    """Optimizer steps taken."""
    skipped: int = 0
    """The skipped ones among them: the learning-rate schedule stands still where the weights do."""
    interrupted: int = 0
    """The signal that ended the run early, 0 when none did."""
    mistake: UserError | None = None
    """What was wrong with the data or an evaluation, where the run ended on it."""
    stopping: str = ""
    """Why a hook ends the run before its last step, the same on every rank."""
    busy_ranks: int = 0
    """How many ranks had a hook that works in the background after step `busy_after`, the same on every rank."""
    busy_after: int = 0
    """This step's number less one, or two where its batch was taken ahead."""
    signals: interrupt.ReceivedSignal = field(default_factory=interrupt.ReceivedSignal)
    """Those of this run; after an interruption they are this object's until `restore`."""
    ahead: TakenBatch | None = None
    """The next step's batch, where it was taken during this step."""
    _inside: bool = False

    @property
    def position(self) -> Mapping[str, Any]:
        """State of the data behind the last batch that was trained on: a batch taken ahead is taken again by a resumed
        run."""
        return self.data.state_dict() if self.ahead is None else self.ahead.before

    def emit(self, event: str, *values: Any) -> None:
        """Calls every hook's method of this name; the time of an event that a hook emits itself counts as that
        hook's."""
        inner = self._inside
        self._inside = True
        for hook in self.hooks:
            with nullcontext() if inner else timed(self.seconds, hook.part):
                getattr(hook, event)(self, *values)
        self._inside = inner


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
