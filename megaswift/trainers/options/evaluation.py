"""Section `evaluation`: when a run is evaluated, and what follows from the result."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import but_not, is_set, one_of, option
from megaswift.options.tasks import DATASETS


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation"""

    eval_strategy: str | None = option(
        None,
        "When to evaluate; default: every eval_steps and at the end",
        aliases=("evaluation_strategy",),
        choices=("no", "steps", "epoch"),
        only_with={"evaluation_data": one_of(True, notice=True)},
        neutral=(None, "no"),
    )
    eval_steps: int | float | None = option(
        None,
        "Steps between evaluations; below 1: fraction of all steps; default: at the end",
        aliases=("eval_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
        only_with={"evaluation_data": one_of(True, notice=True), "eval_strategy": one_of("steps", None, notice=True)},
        common=DATASETS,
    )
    eval_on_start: bool = option(
        False,
        "Also evaluate before the first step",
        tasks=DATASETS,
        only_with={"evaluation_data": one_of(True, notice=True), "eval_strategy": but_not("no", notice=True)},
    )
    load_best_model_at_end: bool = option(False, "Export the checkpoint with the best evaluation, not the last one")
    metric_for_best_model: str | None = option(
        None,
        "Evaluation metric that selects the best model; default: loss, in RL reward",
        only_with={"best_model": is_set(notice=True)},
    )
    greater_is_better: bool | None = option(
        None,
        "Whether a larger metric is better; default: yes, unless its name ends in loss",
        only_with={"best_model": is_set(notice=True)},
    )
    early_stopping_patience: int | None = option(
        None,
        "End the run after this many evaluations without improvement; default: never",
        aliases=("early_stop_interval",),
        minimum=1,
        unit="evaluations",
    )
    early_stopping_threshold: float = option(
        0.0,
        "Smallest change of the metric that early stopping counts as an improvement",
        minimum=0,
        only_with={"early_stopping_patience": is_set()},
    )
