"""What a step of distillation reads: its completions, and the teacher's numbers for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Batch
from megaswift.trainers.batch_fields import BatchTransform
from megaswift.trainers.distillation.largest import TeacherSource
from megaswift.trainers.distillation.on_policy import STUDENT, TEACHER, CompletedRows, writer_of_step
from megaswift.trainers.hook import Run, StepExtras, StepRecord, timed
from megaswift.trainers.rl.generation import CompletionGenerator
from megaswift.trainers.rl.scheduler import Timed


@dataclass(frozen=True)
class Writers:
    """The samplers of a run whose steps may train on completions."""

    seed: int
    lmbda: float
    seq_kd: bool
    rows: CompletedRows
    student: CompletionGenerator | None
    teacher: CompletionGenerator | None
    lend: Callable[[Timed], AbstractContextManager[None]]
    """Returns a context in which the student's sampler has the device and the student's weights."""


class DistillationBatches(BatchTransform):
    """Exchanges the answers of micro-batches where a step asks for it, then adds the teacher's numbers."""

    def __init__(self, teacher: TeacherSource, writers: Writers | None = None) -> None:
        self.teacher = teacher
        self.writers = writers
        self.step = 0
        """Steps that were taken."""
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Exchange answers for completions, in training, and add the fields of the teacher. Collective."""
        if training:
            self.seconds = {}
            self.metrics = {}
        if training and self.writers is not None:
            batches = self._completed(self.writers, batches)
        with timed(self.seconds, "teacher"):
            return self.teacher.add(batches, training)

    def _completed(self, writers: Writers, batches: Sequence[Batch]) -> list[Batch]:
        writer = writer_of_step(writers.seed, self.step, writers.lmbda, writers.seq_kd)
        self.metrics["on_policy"] = float(writer == STUDENT)
        if writer == STUDENT:
            assert writers.student is not None
            with writers.lend(partial(timed, self.seconds)):
                return writers.rows.complete(batches, writers.student, self.step, own=True)
        if writer == TEACHER:
            assert writers.teacher is not None
            with timed(self.seconds, "generation"):
                return writers.rows.complete(batches, writers.teacher, self.step, own=False)
        return list(batches)

    def on_start(self, run: Run) -> None:
        """Take the position of a resumed run."""
        self.step = run.step

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Count the step."""
        self.step = step.number

    def step_extras(self) -> StepExtras:
        """Return where the time of the step went, and whether its completions were the model's own."""
        times = {f"time/{part}": spent for part, spent in self.seconds.items()}
        seconds = dict(self.seconds)
        return StepExtras(self.metrics | times, seconds, training="time/training")

    def close(self) -> None:
        """Close the samplers."""
        if self.writers is not None:
            for generator in (self.writers.student, self.writers.teacher):
                if generator is not None:
                    generator.close()
