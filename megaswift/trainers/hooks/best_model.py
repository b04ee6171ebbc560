"""The best evaluation of a run: `--metric_for_best_model`, early stopping, and the checkpoint of the best model.

Owns the comparison, which is that of transformers' Trainer and its EarlyStoppingCallback. When evaluations and
checkpoints are due belongs to their hooks.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from operator import gt, lt
from pathlib import Path
from typing import Any

from megaswift import distributed, log
from megaswift.base.plain_files import files_below, refuse_links_outside
from megaswift.errors import CheckpointError, ConfigError, Problem, did_you_mean_hint
from megaswift.folders.checkpoint import ENGINE
from megaswift.trainers.file_hashes import damaged_file_problems_all_ranks
from megaswift.trainers.hook import Hook, Line, Run
from megaswift.trainers.hooks.progress import print_line
from megaswift.trainers.options.evaluation import EvaluationConfig


class BestModelHook(Hook):
    """Compares evaluations; ends the run when `patience` of them in succession are no improvement."""

    part = "evaluation"

    def __init__(self, metric: str, greater_is_better: bool, patience: int | None = None, threshold: float = 0) -> None:
        self.root: Path | None = None
        """The folder of the run's checkpoints."""
        self.metric = metric.removeprefix("eval_")
        self.greater_is_better = greater_is_better
        self.patience = patience
        self.threshold = threshold
        self.evaluated: tuple[int, float] | None = None
        """Step and value of the last evaluation."""
        self.best: tuple[int, float] | None = None
        """Step and value of the best evaluation."""
        self.saved: tuple[int, float] | None = None
        """Step and value of the best evaluation whose step was saved."""
        self.waited = 0
        """Evaluations since the last improvement by more than the threshold."""

    def on_start(self, run: Run) -> None:
        """Stop a resumed run that had stopped early, and forget a best checkpoint that is not among this run's.

        It may have been deleted, or belong to another run's folder.
        """
        if self.saved is not None and self.root is not None:
            folder = self.root / f"step-{self.saved[0]}"
            if not distributed.run_on_rank0(folder.is_dir):
                log.warn(f"{folder}, the best checkpoint so far, does not exist: later ones are compared without it")
                self.saved = None
        if self.patience is not None and self.waited >= self.patience:
            run.stopping = self.reason()

    def on_evaluate(self, run: Run, line: Line) -> None:
        """Compares; ends the run where it has waited long enough. The model before the first step is no candidate."""
        if line["step"] == 0:
            return
        if self.metric not in line:
            run.mistake = unknown_metric_error(self.metric, line)
            return
        value = math.nan if line[self.metric] is None else float(line[self.metric])
        first = self.evaluated is None
        before = self.best
        self.evaluated = (int(line["step"]), value)
        improves = self.better(self.evaluated, before)
        if first or improves and (before is None or abs(value - before[1]) > self.threshold):
            self.waited = 0
        else:
            self.waited += 1
        if improves:
            self.best = self.evaluated
        if self.patience is not None and self.waited >= self.patience and not run.stopping:
            run.stopping = self.reason()
            print_line(f"step {run.step}: {run.stopping}")

    def better(self, one: tuple[int, float], other: tuple[int, float] | None) -> bool:
        """Return whether an evaluation is better than an earlier one; one that is not a number never is."""
        worst = -math.inf if self.greater_is_better else math.inf
        return (gt if self.greater_is_better else lt)(one[1], worst if other is None else other[1])

    def improved_at(self, step: int) -> bool:
        """Return whether this step was evaluated and is better than every one whose checkpoint there is."""
        return self.evaluated is not None and self.evaluated[0] == step and self.better(self.evaluated, self.saved)

    def before_save(self, step: int) -> None:
        """Note that this step becomes a checkpoint."""
        if self.improved_at(step):
            self.saved = self.evaluated

    def reason(self) -> str:
        """Return why the run ends early."""
        best = "" if self.best is None else f" over {self.best[1]:.6g} at step {self.best[0]}"
        return f"early stopping: {log.count_text(self.waited, 'evaluation')} without improvement of {self.metric}{best}"

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; an evaluation that is not a number is kept as null."""
        pairs = {"evaluated": self.evaluated, "best": self.best, "saved": self.saved}
        plain = {name: pair and [pair[0], pair[1] if math.isfinite(pair[1]) else None] for name, pair in pairs.items()}
        return {"metric": self.metric, "greater_is_better": self.greater_is_better, "waited": self.waited, **plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; comparisons by another metric are left out."""
        if (state["metric"], state["greater_is_better"]) != (self.metric, self.greater_is_better):
            return
        self.waited = int(state["waited"])
        self.evaluated, self.best, self.saved = (
            pair and (int(pair[0]), math.nan if pair[1] is None else float(pair[1]))
            for pair in (state["evaluated"], state["best"], state["saved"])
        )


def unknown_metric_error(metric: str, line: Line) -> ConfigError:
    """Return the error for a metric that evaluations do not have."""
    names = [name for name in line if name not in ("step", "seconds")]
    fix = did_you_mean_hint(metric, names) or f"use one of {', '.join(names)}"
    return ConfigError(Problem(f"--metric_for_best_model {metric}", "is not a metric of this run's evaluations", fix))


def best_model_hook(options: EvaluationConfig, metric: str, root: Path) -> BestModelHook:
    """Build the hook that compares evaluations by `metric`; `root` is the folder of checkpoints."""
    greater = not metric.endswith("loss") if options.greater_is_better is None else options.greater_is_better
    hook = BestModelHook(metric, greater, options.early_stopping_patience, options.early_stopping_threshold)
    hook.root = root
    return hook


def best_checkpoint(run: Run, root: Path) -> Path | None:
    """Return the checkpoint of the best model among `root`'s steps; None where the present model is the best.
    CheckpointError where it is damaged. Collective."""
    hook = next(hook for hook in run.hooks if isinstance(hook, BestModelHook))
    if hook.saved is None:
        log.warn("no checkpoint has an evaluation: --load_best_model_at_end takes the model of the last step")
        return None
    step, value = hook.saved
    log.info(f"best model: step {step} with {hook.metric} {value:.6g}")
    if step == run.step:
        return None
    folder = root / f"step-{step}"
    if problems := damaged_file_problems_all_ranks(folder):
        raise CheckpointError(problems)
    return folder


def load_best_checkpoint(run: Run, folder: Path) -> None:
    """Load the engine's state of a checkpoint, where the checkpoint holds one. Collective."""
    if (folder / ENGINE).is_dir():
        run.engine.load(folder / ENGINE)


def copy_export(source: Path, target: Path) -> None:
    """Copy a folder of a checkpoint as the export of the run, in place of an earlier one. Collective."""

    def copy() -> None:
        refuse_links_outside(source, files_below(source))
        new = target.with_name(target.name + ".copy")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(source, new)
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)

    distributed.run_on_rank0(copy, hours=24)
