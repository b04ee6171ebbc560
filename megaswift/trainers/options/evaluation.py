"""Section `evaluation`: when a run is evaluated, and what follows from the result."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import but_not, is_set, one_of, option
from megaswift.options.tasks import DATASETS, WRITERS


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
    eval_tasks: tuple[str, ...] = option(
        (),
        "Also evaluate on tasks of lm-evaluation-harness and files of questions",
        tasks=WRITERS,
        only_with={"eval_strategy": but_not("no", notice=True)},
        metavar="NAME|FILE...",
    )
    eval_tasks_limit: float | None = option(
        None,
        "First N questions of each of eval_tasks; below 1: fraction of them",
        above=0,
        tasks=WRITERS,
        metavar="N",
        only_with={"eval_tasks": is_set()},
    )
    eval_tasks_num_fewshot: int | None = option(
        None,
        "Examples before each question of eval_tasks; default: the task's",
        minimum=0,
        tasks=WRITERS,
        unit="examples",
        only_with={"eval_tasks": is_set()},
    )
    eval_tasks_batch_size: int = option(
        8,
        "Questions of a batch of eval_tasks",
        minimum=1,
        tasks=WRITERS,
        unit="questions",
        only_with={"eval_tasks": is_set()},
        neutral=(None,),
    )
    eval_tasks_apply_chat_template: bool = option(
        False,
        "Put eval_tasks into the chat template; files of questions are in any case",
        tasks=WRITERS,
        only_with={"eval_tasks": is_set()},
    )
    eval_tasks_device: str = option(
        "auto",
        "Where rank 0's copy of the model answers eval_tasks; auto: its GPU",
        choices=("auto", "cpu"),
        tasks=WRITERS,
        only_with={"eval_tasks": is_set()},
        neutral=(None,),
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
