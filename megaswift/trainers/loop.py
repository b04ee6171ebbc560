"""The train loop. Metrics, evaluation, checkpoints, timing and the progress bar are hooks.

Leaves out how a step is computed (engine), what a batch holds (data) and how the parts are made (`run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megaswift import distributed
from megaswift.engine.protocol import Engine, GlobalBatchCounts, StartedCount, StepResult
from megaswift.errors import DataError, Problem, UserError, first_line
from megaswift.losses.contract import Batch, Loss
from megaswift.trainers import interrupt
from megaswift.trainers.hook import Hook, StepExtras, StepRecord
from megaswift.trainers.progress import print_warning
from megaswift.trainers.wall_time_by_part import timed


class BatchStream(Protocol):
    """Where the batches come from."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far, as a fraction."""

    @property
    def data_fingerprint(self) -> str:
        """Names the data: the same on every rank, or the ranks have other files."""

    def next(self) -> list[Batch]:
        """This data-parallel rank's micro-batches of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from that position."""


Prepare = Callable[[Engine, list[Batch], bool], list[Batch]]
"""What a task adds to micro-batches that its loss reads; True in training."""


FAILED, SQUARES, BUSY = range(len(interrupt.SIGNALS), len(interrupt.SIGNALS) + 3)
"""Places in what is added up over the ranks with the counts of a step: how many ranks have each signal,
how many have no batch, `StepRecord.squares`, and how many have a hook that works in the background."""


def unchanged(engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
    """Nothing."""
    return batches


@dataclass(frozen=True)
class TakenBatch:
    """A global batch that was taken from the source, while its counts are added up over the ranks."""

    microbatches: list[Batch]
    counts: StartedCount
    mistake: UserError | None
    """Why this rank has no micro-batches."""
    epoch: float
    """Of the source behind it."""
    before: Mapping[str, Any]
    """Position of the source before it; empty with `Loop.mark`."""
    back: Callable[[], None]
    """Takes the source back to there."""
    step: int
    """Steps that were taken when signals and busy hooks were asked for."""


@dataclass
class Loop:
    """Steps from `step` to `total_steps`, the same on every rank."""

    engine: Engine
    source: BatchStream
    loss: Loss
    learning_rate: Callable[[int], float]
    """Learning rate of the step of this number, counted from 0."""
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
    """What takes the source back to where it is now, on every rank; None: its `load_state_dict`."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Others that are trained too, by their folder in a checkpoint."""
    weight_decay: Callable[[int], float | None] = lambda step: None
    """Of a step; None: the configuration's."""
    step: int = 0
    """Optimizer steps taken."""
    skipped: int = 0
    """Of these, skipped ones: the learning-rate schedule stands still where the weights do."""
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
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the parts, for the report."""
    signals: interrupt.ReceivedSignal = field(default_factory=interrupt.ReceivedSignal)
    """Those of this run; after an interruption they are this object's until `restore`."""
    ahead: TakenBatch | None = None
    """The next step's batch, where it was taken during this step (`take_ahead`)."""
    _inside: bool = False

    def run(self) -> None:
        """Trains until the last step, a signal or an unusable row; then the hooks finish their work: nothing trained is
        lost."""
        try:
            self.emit("on_start")
            with interrupt.listen_for_signals() as signal:
                self.signals = signal
                while self.step < self.total_steps and not self.stopping and self.mistake is None:
                    self.emit("on_step_begin")
                    taken = self.take()
                    if taken is None:
                        if self.interrupted:
                            signal.stop(self.interrupted)
                        break
                    batch, counted = taken
                    microbatches = batch.microbatches
                    if not self.prepare_before_counts:
                        microbatches = self.prepare(self.engine, microbatches, True)
                    rate = self.learning_rate(self.step - self.skipped)
                    decay = self.weight_decay(self.step - self.skipped)
                    result = self.engine.train_batch(microbatches, self.loss, rate, decay, counted, self.launched)
                    self.step += 1
                    self.skipped += result.skipped
                    self.emit("on_step", self.record(batch.epoch, rate, result, round(counted.beside[SQUARES])))
                if self.step or self.mistake is None:
                    self.emit("on_end")
            if self.mistake is not None:
                raise self.mistake
        finally:
            for hook in self.hooks:
                try:
                    hook.close()
                except OSError as error:  # what hooks write late must not hide the run's own error
                    print_warning(f"{type(hook).__name__} could not write its last output: {first_line(error)}")

    def record(self, epoch: float, rate: float, result: StepResult, squares: int) -> StepRecord:
        """What hooks see of the step that was taken."""
        extras = self.step_extras()
        result = replace(result, metrics={**result.metrics, **extras.metrics})
        return StepRecord(self.step, epoch, rate, result, squares=squares, extras=extras)

    def take(self) -> tuple[TakenBatch, GlobalBatchCounts] | None:
        """The next global batch and its counts, or None on every rank when any has a signal or met a row that cannot be
        used: the ranks agree in the reduction of the counts.

        The position is then the one before this batch, so that a resumed run meets the row again.
        """
        if self.ahead is None:
            self.emit("on_batch_begin")
        if self.agree_before_batch:
            self.interrupted = int(distributed.all_max([self.signals.number])[0])
        elif distributed.global_world_size() == 1:
            self.interrupted = self.signals.number
        if self.interrupted:
            return None
        taken, self.ahead = self.ahead or self.start_taking(), None
        counted, self.mistake = taken.counts(), taken.mistake
        self.busy_ranks, self.busy_after = round(counted.beside[BUSY]), taken.step
        if counted.beside[FAILED] and self.mistake is None:
            self.mistake = DataError(Problem("the next batch", "another rank found an unusable row; see its message"))
        self.interrupted = max(
            (n for n, ranks in zip(interrupt.SIGNALS, counted.beside, strict=False) if ranks), default=0
        )
        if self.mistake is None and not self.interrupted:
            return taken, counted
        taken.back()
        return None

    def launched(self) -> None:
        """All passes of this step are launched: what the host can do before it waits for them. Collective."""
        self.take_ahead()
        self.emit("on_launched")

    def take_ahead(self) -> None:
        """On several ranks takes the next step's batch and starts to add up its counts, before the host waits for this
        step's numbers: the counts have then arrived with them, and the host does not wait for the device again.

        One rank has nothing to add up; a batch that takes minutes, or needs the weights of this step, is not taken.
        """
        last = self.step + 1 >= self.total_steps
        if self.ahead is None and not last and not self.agree_before_batch and distributed.global_world_size() > 1:
            self.emit("on_batch_begin")
            self.ahead = self.start_taking()

    def start_taking(self) -> TakenBatch:
        """The next global batch, whose counts are on their way. Collective."""
        state = self.source.state_dict() if self.mark is None else {}
        back = (lambda: self.source.load_state_dict(state)) if self.mark is None else self.mark()
        microbatches: list[Batch] = []
        mistake = None
        try:
            microbatches = self.source.next()
        except UserError as error:
            mistake = error
        self.emit("on_batch")
        if self.prepare_before_counts and microbatches:
            microbatches = self.prepare(self.engine, microbatches, True)
        squares = sum(length_squares(b) for b in microbatches)
        layout = self.engine.layout
        # a batch that takes minutes is trained on: with agree_before_batch its signal counts before the next one
        signals = [self.signals.number == number and not self.agree_before_batch for number in interrupt.SIGNALS]
        beside = [*signals, mistake is not None, squares / (layout.tp * layout.pp * layout.cp)]
        beside.append(any(hook.busy for hook in self.hooks))
        counts = self.engine.start_count(microbatches, self.loss, beside)
        return TakenBatch(microbatches, counts, mistake, self.source.epoch, state, back, self.step)

    @property
    def position(self) -> Mapping[str, Any]:
        """State of the source behind the last batch that was trained on: a batch taken ahead is taken again by a
        resumed run."""
        return self.source.state_dict() if self.ahead is None else self.ahead.before

    def emit(self, event: str, *values: Any) -> None:
        """Calls every hook's method of this name; the time of an event that a hook emits itself counts as that
        hook's."""
        inner, self._inside = self._inside, True
        for hook in self.hooks:
            with nullcontext() if inner else timed(self.seconds, hook.part):
                getattr(hook, event)(self, *values)
        self._inside = inner


def length_squares(batch: Batch) -> int:
    """Sum over documents of length squared: a document of n tokens has positions 0..n-1, and n^2 = sum of (2 p + 1)."""
    return int(((2 * batch.positions + 1) * batch.valid).sum())
