"""Learning rates that fall when evaluations stop improving (`lr_scheduler_type reduce_lr_on_plateau`).

Owns when the rate falls, as in torch's ReduceLROnPlateau; its state travels in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megaswift.trainers.hook import Hook, Line, Rate, Run
from megaswift.trainers.hooks.best_model import unknown_metric_error
from megaswift.trainers.hooks.progress import print_line
from megaswift.trainers.options.schedule import ScheduleConfig
from megaswift.trainers.schedule import final_rate

SMALLEST_CHANGE = 1e-8
"""torch's `eps`: a rate that would change by less stays."""


class ReduceOnPlateauHook(Hook):
    """Compares evaluations, and reduces the rate after more than `patience` without improvement."""

    part = "evaluation"

    def __init__(self, schedule: ScheduleConfig, peak: float, metric: str, greater_is_better: bool) -> None:
        self.schedule = schedule
        self.peak = peak
        self.metric = metric
        self.greater_is_better = greater_is_better
        self.share = 1.0
        """The share of the learning rate that is left."""
        self.best = -math.inf if greater_is_better else math.inf
        self.waited = 0
        self.cooldown = 0

    @property
    def rate(self) -> float:
        """The learning rate that evaluations so far allow."""
        return self.share * self.peak

    def on_evaluate(self, run: Run, line: Line) -> None:
        """Compares one; the model before the first step is no candidate."""
        if line["step"] == 0:
            return
        if self.metric not in line:
            run.mistake = unknown_metric_error(self.metric, line)
            return
        value = math.nan if line[self.metric] is None else float(line[self.metric])
        before = self.rate
        self.take(value)
        if self.rate < before:
            print_line(f"learning rate {before:g} -> {self.rate:g}: no better {self.metric} than {self.best:.6g}")

    def take(self, value: float) -> None:
        """Compare an evaluation with the best one, and lower the rate when it is due."""
        options = self.schedule
        if self._improves(value):
            self.best = value
            self.waited = 0
        else:
            self.waited += 1
        if self.cooldown:
            self.cooldown = self.cooldown - 1
            self.waited = 0
        if self.waited <= options.plateau_patience:
            return
        rate = max(self.rate * options.plateau_factor, final_rate(options, self.peak))
        if self.rate - rate > SMALLEST_CHANGE:
            self.share = rate / self.peak
        self.cooldown = options.plateau_cooldown
        self.waited = 0

    def _improves(self, value: float) -> bool:
        threshold = self.schedule.plateau_threshold
        sign = 1 if self.greater_is_better else -1
        if self.schedule.plateau_threshold_mode == "abs":
            limit = self.best + sign * threshold
        else:
            limit = self.best * (1 + sign * threshold)
        return value > limit if self.greater_is_better else value < limit

    def state_dict(self) -> dict[str, Any]:
        """Return the state; infinite numbers are texts, because JSON lacks them."""
        return {"share": self.share, "best": str(self.best), "waited": self.waited, "cooldown": self.cooldown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.share = float(state["share"])
        self.best = float(state["best"])
        self.waited = int(state["waited"])
        self.cooldown = int(state["cooldown"])


def plateau_hook(
    schedule: ScheduleConfig, peak: float, metric: str, greater_is_better: bool | None
) -> ReduceOnPlateauHook:
    """Build the hook that watches `metric`; without `greater_is_better` a smaller loss is better, else the larger
    value."""
    greater = not metric.endswith("loss") if greater_is_better is None else greater_is_better
    return ReduceOnPlateauHook(schedule, peak, metric, greater)


def lowered_rate(rate: Rate, plateau: ReduceOnPlateauHook, step: int, total_steps: int) -> float:
    """Return the schedule's rate, lower where evaluations have reduced it."""
    return min(rate(step, total_steps), plateau.rate)
