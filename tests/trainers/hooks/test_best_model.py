"""The best evaluation, early stopping and the best checkpoint; transformers' callback and Trainer are the oracle."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState

from megaswift.errors import CheckpointError, ConfigError
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hook import Every, Hook, Run
from megaswift.trainers.hooks.best_model import BestModelHook, best_checkpoint, load_best_checkpoint
from megaswift.trainers.hooks.checkpoint import CheckpointHook, restore_run
from megaswift.trainers.loop import train
from tests.trainers.tiny import tiny_loop

NAN = math.nan
CURVES = [
    [3.0, 2.0, 2.5, 2.4, 1.9, 2.0, 2.1, 2.2],
    [3.0, 2.95, 2.93, 2.92, 2.5, 2.46, 2.45],
    [NAN, 2.0, NAN, 1.0, 1.0, 1.0],
    [0.1, 0.2, 0.15, 0.3, 0.3, 0.29],
    [1.0, 1.0, 1.0],
]


class Evaluations(Hook):
    """An evaluation of known value after each step."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_step(self, loop: Run, step: Any) -> None:
        value = self.values[step.number - 1]
        loop.emit("on_evaluate", {"step": step.number, "loss": value, "accuracy": value, "seconds": 1.0})


def transformers_run(
    values: list[float], greater: bool, patience: int, threshold: float
) -> tuple[int, float | None, int | None]:
    """Steps taken, the best value and its step, by transformers' own code."""
    callback = EarlyStoppingCallback(patience, threshold)
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=greater, save_strategy="steps")
    trainer = SimpleNamespace(args=args, state=TrainerState())
    control = TrainerControl()
    for number, value in enumerate(values, 1):
        trainer.state.global_step = number
        callback.on_evaluate(args, trainer.state, control, {"eval_loss": value})
        Trainer._determine_best_metric(trainer, {"eval_loss": value}, None)  # type: ignore[arg-type]
        if control.should_training_stop:
            break
    return number, trainer.state.best_metric, trainer.state.best_global_step


@pytest.mark.parametrize("values", CURVES)
@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (2, 0.0), (3, 0.0), (2, 0.1)])
def test_stops_where_transformers_stops(values: list[float], greater: bool, patience: int, threshold: float) -> None:
    hook = BestModelHook("eval_loss", greater, patience, threshold)
    loop = tiny_loop(len(values), Evaluations(values), hook)
    train(loop)
    steps, metric, best = transformers_run(values, greater, patience, threshold)
    assert loop.step == steps
    assert hook.best == (None if best is None else (best, metric))
    assert bool(loop.stopping) == (hook.waited >= patience)


def saved_loop(folder: Path, values: list[float], *, every: Every = 1, limit: int | None = None, **early: Any) -> Run:
    store = CheckpointStore(folder / "checkpoints")
    hook = BestModelHook("loss", False, **early)
    hook.root = store.root
    checkpoint = CheckpointHook(store, every, limit, {"model": {}, "config": {}})
    checkpoint.best = hook
    return tiny_loop(len(values), Evaluations(values), hook, checkpoint)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("limit", "left"), [(1, [2, 6]), (2, [2, 6]), (3, [2, 5, 6]), (None, [1, 2, 3, 4, 5, 6])])
def test_the_best_checkpoint_is_not_deleted(tmp_path: Path, limit: int | None, left: list[int]) -> None:
    train(saved_loop(tmp_path, [3, 1, 2, 2, 2, 2], limit=limit))
    assert steps_in(tmp_path) == left


def test_best_saves_at_improvements_and_at_the_end(tmp_path: Path) -> None:
    train(saved_loop(tmp_path, [3, 4, 2, 5, 1, 6, 6], every="best"))
    assert steps_in(tmp_path) == [1, 3, 5, 7]


def test_a_better_evaluation_between_checkpoints_is_not_the_best_checkpoint(tmp_path: Path) -> None:
    loop = saved_loop(tmp_path, [3, 2, 1, 2.5, 2.6, 2.4], every=2)
    train(loop)
    best = best_checkpoint(loop, tmp_path / "checkpoints")
    assert best is not None and best.name == "step-2"


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    """Its weights are those of a run that ended there."""
    loop = saved_loop(tmp_path / "long", [3, 2, 1, 4, 5])
    train(loop)
    short = saved_loop(tmp_path / "short", [3, 2, 1])
    train(short)
    best = best_checkpoint(loop, tmp_path / "long" / "checkpoints")
    assert best is not None and best.name == "step-3"
    load_best_checkpoint(loop, best)
    for name, value in short.engine.model.state_dict().items():
        assert torch.equal(value, loop.engine.model.state_dict()[name]), name
    assert best_checkpoint(short, tmp_path / "short" / "checkpoints") is None  # the last step is the best
    (best / "engine" / "state.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="state.pt"):
        best_checkpoint(loop, tmp_path / "long" / "checkpoints")


def test_a_resumed_run_stops_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    whole = saved_loop(tmp_path / "whole", values, patience=3)
    train(whole)
    train(saved_loop(tmp_path / "cut", values[:4], patience=3))
    second = saved_loop(tmp_path / "cut", values, patience=3)
    restore_run(second, tmp_path / "cut" / "checkpoints" / "step-4", {})
    train(second)
    assert (second.step, second.stopping) == (whole.step, whole.stopping) and whole.step == 5
    third = saved_loop(tmp_path / "cut", values, patience=3)  # a finished run takes no step
    restore_run(third, tmp_path / "cut" / "checkpoints" / "step-5", {})
    train(third)
    assert third.step == 5 and third.stopping
    best = best_checkpoint(third, tmp_path / "cut" / "checkpoints")
    assert best is not None and best.name == "step-2"


def test_a_checkpoint_of_another_folder_is_not_the_best(tmp_path: Path) -> None:
    train(saved_loop(tmp_path / "first", [1, 2, 3]))
    other = saved_loop(tmp_path / "other", [1, 2, 3, 4, 3.5])
    restore_run(other, tmp_path / "first" / "checkpoints" / "step-3", {})
    train(other)
    assert best_checkpoint(other, tmp_path / "other" / "checkpoints") is None  # step 5, the last, is better than 4


def test_the_best_of_a_new_folder_is_saved(tmp_path: Path) -> None:
    """Though the run that it goes on from had a better one."""
    train(saved_loop(tmp_path / "first", [1, 5], every="best"))
    other = saved_loop(tmp_path / "other", [1, 5, 2, 4, 3], every="best")
    restore_run(other, tmp_path / "first" / "checkpoints" / "step-2", {})
    train(other)
    assert steps_in(tmp_path / "other") == [3, 5]  # 5 is the last


def test_an_unknown_metric_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    loop = saved_loop(tmp_path, [1, 2, 3], every=None)
    next(hook for hook in loop.hooks if isinstance(hook, BestModelHook)).metric = "acuracy"
    with pytest.raises(ConfigError, match=r"(?s)--metric_for_best_model acuracy: is not a metric.*accuracy"):
        train(loop)
    assert steps_in(tmp_path) == [1]
