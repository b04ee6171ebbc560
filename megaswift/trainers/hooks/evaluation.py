"""The evaluation hook: every `eval_steps` or epoch and after the last step, written to eval.jsonl.

The loss is the objective over the whole validation set, or the part of it that the batches hold: sums and counts of
each term and mean are added up and divided once, so that it does not matter how rows are cut into batches and spread
over ranks. Touches no state.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.engine.protocol import Addends, Engine
from megaswift.engine.reported_numbers import differences, ratios
from megaswift.losses.contract import Addable, Batch
from megaswift.trainers.hook import Every, Run, StepRecord
from megaswift.trainers.hooks.metrics import IntervalLinesHook, MetricsWindow, step_mean_weight
from megaswift.trainers.hooks.progress import print_line

if TYPE_CHECKING:
    from megaswift.evaluation.training import TrainingTasks


def task_scores(tasks: TrainingTasks | None, run: Run) -> Mapping[str, float]:
    """Return the scores of tasks by name, with the seconds that they took; nothing without tasks. Collective."""
    if tasks is None:
        return {}
    began = time.perf_counter()
    scores = tasks.scores(run.engine)
    print_line(f"step {run.step}: {', '.join(f'{name} {value:.4g}' for name, value in scores.items())}")
    return {**scores, "eval_tasks_seconds": time.perf_counter() - began}


class AddendsOfBatches:
    """Sums and counts of several batches, divided once."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, tuple[float, float]]] = {"terms": {}, "means": {}}
        self.differences: dict[str, tuple[str, str]] = {}
        self.vectors: dict[str, tuple[float, ...]] = {}
        self.addable: dict[str, Addable] = {}

    def add(self, batch: Addends) -> None:
        """Add the numbers of one batch."""
        for kind, sums in self.sums.items():
            for name, (total, count) in getattr(batch, kind).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        self.differences |= batch.differences
        self.addable |= batch.addable
        for name, numbers in batch.vectors.items():
            earlier = self.vectors.get(name, (0.0,) * len(numbers))
            self.vectors[name] = tuple(a + b for a, b in zip(earlier, numbers, strict=True))

    @property
    def loss(self) -> float:
        """The objective."""
        return sum(ratios(self.sums["terms"]).values())

    @property
    def metrics(self) -> dict[str, float]:
        """Terms where there are several, means, differences of means, and what is made of vectors."""
        terms, means = (ratios(self.sums[kind]) for kind in ("terms", "means"))
        found = means | (terms if len(self.sums["terms"]) > 1 else {})
        made = [self.addable[name].metrics(numbers) for name, numbers in self.vectors.items()]
        found |= {name: value for metrics in made for name, value in metrics.items()}
        return found | differences(Addends(differences=self.differences), found)


class EvaluationMeasure(ABC):
    """Measures something of all validation rows together, which no sum over batches gives."""

    @abstractmethod
    def begin(self) -> None:
        """Start an evaluation."""

    @abstractmethod
    def add(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Look at this rank's micro-batches. Collective."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return what was measured, on every rank. Collective."""


class EvaluationHook(IntervalLinesHook):
    """Runs the validation batches through the engine."""

    part = "evaluation"

    def __init__(
        self,
        path: Path,
        batches: Callable[[], Iterable[list[Batch]]],
        every: Every,
        count: str,
        on_start: bool = False,
        tasks: TrainingTasks | None = None,
        measure: EvaluationMeasure | None = None,
    ) -> None:
        super().__init__(path, every)
        self.batches = batches
        self.count = count
        self.before_first_step = on_start
        self.tasks = tasks
        self.measure = measure
        self.last = 0
        """The step of the last evaluation."""

    def on_step_begin(self, run: Run) -> None:
        """Evaluates before the first step, where that is asked for."""
        if self.before_first_step and run.step == 0:
            self.before_first_step = False
            self.evaluate(run, 0.0)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Evaluates when it is due."""
        if self.interval.due(step) or step.number == run.total_steps:
            self.evaluate(run, step.epoch)

    def evaluate(self, run: Run, epoch: float) -> dict[str, Any]:
        """Evaluate the whole validation set and write one line."""
        began = time.perf_counter()
        window = MetricsWindow()
        added = AddendsOfBatches()
        if self.measure is not None:
            self.measure.begin()
        for microbatches in self.batches():
            prepared = run.prepare(run.engine, microbatches, False)
            result = run.engine.evaluate(prepared, run.loss)
            if self.measure is not None:
                self.measure.add(run.engine, prepared)
            step = StepRecord(run.step, epoch, 0.0, result)
            window.add(step, step_mean_weight(step, self.count))
            added.add(result.addends)
            run.emit("on_evaluation_batch", window.steps)
        self.last = run.step
        line: dict[str, Any] = {
            "step": run.step,
            "epoch": epoch,
            "loss": added.loss if window.weight else math.nan,
            "tokens": window.tokens,
            "label_tokens": window.label_tokens,
            "batches": window.steps,
            "seconds": time.perf_counter() - began,
        }
        metrics = {k: v / window.weights[k] for k, v in window.metrics.items()} | added.metrics
        metrics |= {} if self.measure is None else self.measure.metrics()
        line |= {k: v for k, v in metrics.items() if k not in line}
        line |= task_scores(self.tasks, run)
        self.write(line)
        run.emit("on_evaluate", line)
        return line
