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
    """Add the wall time of the block to this part of `seconds`, also when the block fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began


class BatchStream(Protocol):
    """Source of the global batches of a run, with a position that can be saved."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far, as a fraction."""

    @property
    def data_fingerprint(self) -> str:
        """A text that identifies the data: equal on all ranks, unless they read different files."""

    def next(self) -> list[Batch]:
        """Return this data-parallel rank's micro-batches of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned."""


Rate = Callable[[int, int], float]
"""(step, counted from 0, of how many) -> learning rate."""
Prepare = Callable[[Engine, list[Batch], bool], list[Batch]]
"""What a task adds to micro-batches that its loss reads; True in training."""


def unchanged(engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
    """Return the micro-batches as they are: the `prepare` of tasks whose loss reads nothing besides."""
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
    """The additions of a source of batches to the record of the step that they were for."""

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
    """Act at fixed points of the train loop; subclasses override the methods that they need.

    The loop calls every hook of a run, in order, on every rank. `run.step` counts the optimizer steps that are taken.
    A method may be collective if all ranks reach it at the same step, which holds for all methods but `close`.
    """

    part = "logging"
    """Under which name the hook's time stands in the report."""

    busy = False
    """Whether this rank works in the background; `Run.busy_ranks` counts the ranks that do."""

    wants_checkpoint = False
    """Whether a checkpoint is due for a reason that not all ranks know; they agree on `Run.wants_checkpoint`."""

    def on_start(self, run: Run) -> None:
        """Prepare the first step; a checkpoint has been restored by now."""

    def on_step_begin(self, run: Run) -> None:
        """Act before each optimizer step."""

    def on_batch_begin(self, run: Run) -> None:
        """Act before a batch is requested.

        On several ranks it is the batch of the next step, and `run.step` does not count the present step yet.
        """

    def on_batch(self, run: Run) -> None:
        """Act when the requested batch has arrived."""

    def on_launched(self, run: Run) -> None:
        """Do work on the host while the device is still busy with all passes of a step; `run.step` does not count it
        yet."""

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Act after each optimizer step.

        Args:
            run: The run, which counts the step.
            step: The numbers and times of the step.
        """

    def on_log(self, run: Run, line: Line) -> None:
        """Take a line of metrics, which is made every `logging_steps` steps.

        Args:
            run: The run at the step of the line.
            line: Metrics by name, as in metrics.jsonl.
        """

    def on_evaluation_batch(self, run: Run, batches: int) -> None:
        """Act after a batch of an evaluation.

        Args:
            run: The run at the step of the evaluation.
            batches: Those that are evaluated so far.
        """

    def on_evaluate(self, run: Run, line: Line) -> None:
        """Take the result of an evaluation.

        Args:
            run: The run at the step of the evaluation.
            line: Metrics by name, as in eval.jsonl.
        """

    def on_end(self, run: Run) -> None:
        """Finish after the last step, or after an interruption (`run.interrupted` is the signal)."""

    def check_progress(self, run: Run) -> None:
        """Check a resumed run that has no step left.

        Raises:
            UserError: The run has learned nothing.
        """

    def close(self) -> None:
        """Close files and bars. Called last, also after an error; makes no collective call."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of this hook.

        Returns:
            Plain values, which rank 0 writes into the checkpoint.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the hook before a resumed run starts.

        Args:
            state: What `state_dict` returned when the checkpoint was written.
        """


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
    """Returns the weight decay of a step, called like `learning_rate`; None: the configuration's."""
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
    wants_checkpoint: bool = False
    """Whether a hook of some rank wanted a checkpoint after step `busy_after`, the same on every rank."""
    signals: interrupt.ReceivedSignal = field(default_factory=interrupt.ReceivedSignal)
    """Those of this run; after an interruption they are this object's until `restore`."""
    ahead: TakenBatch | None = None
    """The next step's batch, where it was taken during this step."""
    _inside: bool = False

    @property
    def position(self) -> Mapping[str, Any]:
        """State of the data behind the last batch that was trained on.

        A batch that was taken ahead does not count: a resumed run takes it again.
        """
        return self.data.state_dict() if self.ahead is None else self.ahead.before

    def emit(self, event: str, *values: Any) -> None:
        """Call every hook's method of this name and add its time to the hook's part of the run.

        An event that a hook emits itself counts as time of that hook.
        """
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
    """Return the interval that a strategy and a number of steps describe together."""
    return steps if strategy in (None, "steps") else strategy


def steps_of(steps: float, total_steps: int) -> int:
    """Return an interval in steps; below 1 it is a fraction of all steps, rounded up (as transformers does)."""
    return ceil(total_steps * steps) if steps < 1 else int(steps)


class StepInterval:
    """Decides at which steps something falls due, and keeps count of epochs for it."""

    def __init__(self, every: Every) -> None:
        self.every = every
        self.epochs: int | None = None
        """Epochs that are complete; None before the run starts."""

    def start(self, run: Run) -> None:
        """Start counting at the first step of the run, or at the step of the checkpoint."""
        if isinstance(self.every, float):
            self.every = steps_of(self.every, run.total_steps)
        if self.epochs is None:
            self.epochs = floor(run.data.epoch)

    def due(self, step: StepRecord) -> bool:
        """Return whether something falls due at this step. Called once a step.

        A global batch may go on into the next epoch: the step that takes an epoch's last row completes it.
        """
        before = self.epochs or 0
        self.epochs = max(self.epochs or 0, floor(step.epoch))
        if self.every == EPOCH:
            return self.epochs > before
        return isinstance(self.every, int) and step.number % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the count of epochs, where the interval depends on it."""
        return {"epochs": self.epochs} if self.every == EPOCH else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count that `state_dict` returned."""
        self.epochs = None if state.get("epochs") is None else int(state["epochs"])
