"""Options of evaluation, saving, the best model and early stopping: each row of the rules fires when it should and is
silent when its condition is met."""

from __future__ import annotations

import pytest

from megaswift.config import load_config
from megaswift.trainers.options.evaluation_checks import (
    EVALUATION_CLASHES,
    best_model_metric,
    compares_evaluations,
)
from tests.config.refusals import assert_contradiction, assert_idle, problems

VAL = "--val_dataset v --eval_steps 5"
IDLE = [
    ("--eval_steps 5", "--eval_steps 5 --val_dataset v"),
    ("--eval_iters 5", "--eval_iters 5 --split_dataset_ratio 0.1"),
    ("--per_device_eval_batch_size 5", "--per_device_eval_batch_size 5 --val_dataset v"),
    ("--eval_on_start", f"--eval_on_start {VAL}"),
    ("--ignore_data_skip", "--ignore_data_skip --resume_from_checkpoint latest"),
    ("--eval_strategy epoch", "--eval_strategy epoch --val_dataset v"),
    ("--eval_strategy steps --val_dataset v", f"--eval_strategy steps {VAL}"),
    ("--save_strategy steps", "--save_strategy steps --save_steps 5"),
    ("--eval_steps 5 --eval_strategy epoch --val_dataset v", f"--eval_strategy steps {VAL}"),
    ("--save_steps 5 --save_strategy epoch", "--save_steps 5 --save_strategy steps"),
    (f"--metric_for_best_model accuracy {VAL}", f"--metric_for_best_model accuracy {VAL} --save_strategy best"),
    (f"--greater_is_better true {VAL}", f"--greater_is_better true {VAL} --early_stopping_patience 2"),
    (
        f"--early_stopping_threshold 0.1 {VAL}",
        f"--early_stopping_threshold 0.1 {VAL} --early_stop_interval 2",
    ),
    ("--hub_model_id a/b", "--hub_model_id a/b --push_to_hub"),
    ("--hub_token t", "--hub_token t --push_to_hub"),
    ("--hub_private_repo", "--hub_private_repo --push_to_hub"),
    ("--hub_strategy every_save", "--hub_strategy every_save --push_to_hub --save_only_model"),
    ("--hub_revision trial", "--hub_revision trial --push_to_hub"),
    (
        f"--load_best_model_at_end {VAL} --save_steps 5 --export_hf false",
        f"--load_best_model_at_end {VAL} --save_steps 5",
    ),
]
CLASHING = [
    ("eval_strategy", "--eval_strategy epoch --val_dataset v --streaming --max_steps 3"),
    ("save_strategy", "--save_strategy epoch --streaming --max_steps 3"),
    ("load_best_model_at_end", f"--load_best_model_at_end {VAL} --save_steps 7"),
    ("load_best_model_at_end", f"--load_best_model_at_end {VAL} --save_strategy epoch"),
    ("load_best_model_at_end", f"--load_best_model_at_end {VAL}"),
    ("load_best_model_at_end", "--load_best_model_at_end --save_steps 5"),
    ("save_strategy", "--save_strategy best"),
    ("save_strategy", "--save_strategy best --val_dataset v"),
    ("early_stopping_patience", "--early_stopping_patience 2 --val_dataset v"),
    ("early_stopping_patience", "--early_stopping_patience 2"),
    ("lr_scheduler_type", "--lr_scheduler_type reduce_lr_on_plateau --val_dataset v"),
    (
        "metric_for_best_model",
        f"grpo --reward_funcs length --metric_for_best_model loss {VAL} --early_stopping_patience 2",
    ),
    ("save_strategy", "--save_strategy no --export_hf false"),
    ("save_strategy", "--save_strategy no --max_restarts 2 --nproc_per_node 2"),
    ("push_to_hub", "--push_to_hub --export_hf false"),
    ("push_to_hub", "--push_to_hub --train_type lora --init_weights pissa"),
    ("push_to_hub", "--push_to_hub --train_type lora --new_special_tokens <t>"),
    ("hub_strategy", "--hub_strategy every_save --push_to_hub"),
    ("hub_revision", "--hub_revision trial --push_to_hub --use_hf false"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


def test_every_row_is_tried() -> None:
    assert {name for name, _ in CLASHING} == {r.options[0] for r in EVALUATION_CLASHES}


@pytest.mark.parametrize(
    "words",
    [
        "--load_best_model_at_end --val_dataset v --eval_steps 5 --save_steps 10",
        "--load_best_model_at_end --val_dataset v --eval_strategy epoch --save_strategy epoch",
        "--load_best_model_at_end --val_dataset v --eval_strategy epoch --save_strategy best",
        "--load_best_model_at_end --train_type lora --val_dataset v --eval_steps 5 --save_steps 5",
        "--eval_strategy no",
        "--push_to_hub --train_type lora --init_weights pissa --merge_lora",
        "--push_to_hub --train_type lora --hub_strategy every_save",
        "--save_strategy no",
        "--save_strategy epoch --save_total_limit 2",
        "--evaluation_strategy epoch --val_dataset v",
        "--eval_strategy epoch --eval_steps 5",
    ],
)
def test_what_goes_together(words: str) -> None:
    assert problems(words) == []


def test_the_metric_that_is_compared() -> None:
    given = ["--val_dataset", "v", "--eval_steps", "5", "--early_stopping_patience", "2"]
    assert best_model_metric(load_config("sft", given, environ={})) == "loss"
    named = load_config("sft", [*given, "--metric_for_best_model", "eval_token_accuracy"], environ={})
    assert best_model_metric(named) == "token_accuracy" and compares_evaluations(named)
    assert best_model_metric(load_config("grpo", [*given, "--reward_funcs", "length"], environ={})) == "reward"
    assert not compares_evaluations(load_config("sft", [], environ={}))


def test_no_takes_the_interval_away() -> None:
    cfg = load_config("sft", ["--val_dataset", "v", "--eval_strategy", "no", "--eval_steps", "5"], environ={})
    assert cfg.evaluation.eval_strategy == "no" and cfg.evaluation.eval_steps is None
