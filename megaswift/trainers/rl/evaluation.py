"""The evaluation hook of reinforcement learning: mean rewards on held-out prompts, written to eval.jsonl. It changes
no state of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.data.prompts.source import Prompt
from megaswift.trainers.hook import Every, Run, StepRecord
from megaswift.trainers.hooks.evaluation import task_scores
from megaswift.trainers.hooks.metrics import IntervalLinesHook
from megaswift.trainers.rl.metrics import rollout_statistics
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from megaswift.trainers.rl.scorer import RewardScorer

if TYPE_CHECKING:
    from megaswift.evaluation.training import TrainingTasks

APART = 2**40
"""Added to the step, it numbers an evaluation's draws apart from those of any generation."""


class RewardEvaluationHook(IntervalLinesHook):
    """One completion of each held-out prompt every `eval_steps` or epoch and after the last step."""

    part = "evaluation"

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        work: tuple[CompletionSamplingScheduler, RewardScorer],
        every: Every,
        tasks: TrainingTasks | None = None,
    ) -> None:
        super().__init__(path, every)
        self.tasks = tasks
        self.prompts = prompts
        self.scheduler, self.scorer = work

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Evaluates when it is due."""
        if self.interval.due(step) or step.number == run.total_steps:
            self.evaluate(run, step)

    def evaluate(self, run: Run, step: StepRecord) -> dict[str, Any]:
        """Evaluate all prompts and write one line."""
        began = time.perf_counter()
        self.scheduler.settle()
        with self.scheduler.lend_device(lambda _: nullcontext()):
            self.scheduler.queue.synchronized_unnumbered()
            completions = self.scheduler.generation.write(self.prompts, APART + step.number)
        rollouts = self.scorer(
            self.prompts, completions, self.scheduler.generation.scored_completions(len(self.prompts))
        )
        line: dict[str, Any] = {
            "step": step.number,
            "epoch": step.epoch,
            "loss": math.nan,
            **rollout_statistics(rollouts, 1),
        }
        line |= task_scores(self.tasks, run)
        line |= {"prompts": len(self.prompts), "seconds": time.perf_counter() - began}
        self.write(line)
        run.emit("on_evaluate", line)
        return line
