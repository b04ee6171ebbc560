"""Intervals of evaluation and saving: steps and epochs, over resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_callback import TrainerState

from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hook import Every, Hook, Run, interval_of, steps_of
from megaswift.trainers.hooks.checkpoint import CheckpointHook, restore_run
from megaswift.trainers.hooks.evaluation import EvaluationHook
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.loop import train
from tests.trainers.tiny import TinySource, batch, tiny_loop


class Rows(TinySource):
    """`rows` rows an epoch, `taken` at a step."""

    rows, taken = 7, 3

    @property
    def epoch(self) -> float:
        return self.position * self.taken / self.rows


def epoch_loop(folder: Path, steps: int, every: Every, *hooks: Hook) -> Run:
    folder.mkdir(exist_ok=True)
    evaluation = EvaluationHook(folder / "eval.jsonl", lambda: [[batch(8, 5)]], every, "label_weight")
    checkpoint = CheckpointHook(CheckpointStore(folder / "checkpoints"), every, None, {"model": {}, "config": {}})
    loop = tiny_loop(steps, evaluation, *hooks, checkpoint)
    loop.data = Rows()
    return loop


def evaluated(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(folder / "eval.jsonl")]


def saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))


def test_an_epoch_ends_with_the_step_that_takes_its_last_row(tmp_path: Path) -> None:
    """7 rows, 3 a step: 21 rows are three epochs, and the ends lie in steps 3, 5 and 7."""
    train(epoch_loop(tmp_path, 8, "epoch"))
    assert evaluated(tmp_path) == [3, 5, 7, 8] and saved(tmp_path) == [3, 5, 7, 8]


def test_steps_of_more_than_an_epoch(tmp_path: Path) -> None:
    loop = epoch_loop(tmp_path, 3, "epoch")
    loop.data.taken = 15
    train(loop)
    assert evaluated(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("at", range(1, 8))
def test_a_resumed_run_has_the_same_epochs(tmp_path: Path, at: int) -> None:
    train(epoch_loop(tmp_path, at, "epoch"))
    folder = tmp_path / "checkpoints" / f"step-{at}"
    for other in (tmp_path / "checkpoints").glob("step-*"):
        if other != folder:
            other.rename(tmp_path / f"earlier-{other.name}")
    second = epoch_loop(tmp_path, 8, "epoch")
    restore_run(second, folder, {})
    train(second)
    assert saved(tmp_path) == sorted({at, *(n for n in (3, 5, 7, 8) if n > at)})
    assert evaluated(tmp_path) == sorted({at, *(n for n in (3, 5, 7, 8))})


def test_a_position_ahead_of_the_steps_is_counted_once(tmp_path: Path) -> None:
    """Completions may be sampled ahead of time: the source's position goes back when a run resumes."""
    first = epoch_loop(tmp_path, 3, "epoch")
    train(first)
    second = epoch_loop(tmp_path, 5, "epoch")
    restore_run(second, tmp_path / "checkpoints" / "step-3", {})
    second.data.position = 2
    train(second)
    assert evaluated(tmp_path) == [3, 5]


def test_no_saves_what_was_interrupted_only(tmp_path: Path) -> None:
    class Stop(Hook):
        def on_step(self, loop: Run, step: Any) -> None:
            loop.interrupted = 15 if step.number == 2 else 0
            loop.stopping = "signal" if step.number == 2 else ""

    train(epoch_loop(tmp_path / "whole", 4, "no"))
    train(epoch_loop(tmp_path / "cut", 4, "no", Stop()))
    assert saved(tmp_path / "whole") == [] and saved(tmp_path / "cut") == [2]


def test_a_strategy_and_steps_together() -> None:
    assert [interval_of(*pair) for pair in ((None, 5), ("steps", 5), ("epoch", 5), ("no", None), (None, None))] == [
        5,
        5,
        "epoch",
        "no",
        None,
    ]


GIVEN = ["--model", "m", "--dataset", "d.jsonl", "--val_dataset", "v.jsonl"]


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3, 0.003, 0.999, 7, 50])
@pytest.mark.parametrize("total", [1, 37, 1000])
def test_steps_are_those_of_transformers(fraction: float, total: int) -> None:
    state = TrainerState()
    arguments: Any = SimpleNamespace(logging_steps=fraction, eval_steps=fraction, save_steps=fraction)
    state.compute_steps(arguments, total)
    assert steps_of(fraction, total) == state.save_steps


def test_fractions_of_all_steps(tmp_path: Path) -> None:
    """0.3 of 11 steps are 4, rounded up."""
    train(epoch_loop(tmp_path, 11, 0.3))
    assert evaluated(tmp_path) == saved(tmp_path) == [4, 8, 11]


@pytest.mark.parametrize("name", ["eval_steps", "save_steps", "logging_steps"])
def test_values(name: str) -> None:
    assert load_config("sft", [*GIVEN, f"--{name}", "0.1"], environ={}).value(name) == 0.1
    value = load_config("sft", [*GIVEN, f"--{name}", "20.0"], environ={}).value(name)
    assert value == 20 and isinstance(value, int)
    for wrong in ("1.5", "-0.1", "0"):
        with pytest.raises(ConfigError, match="must be"):
            load_config("sft", [*GIVEN, f"--{name}", wrong], environ={})


@pytest.mark.parametrize(("save", "accepted"), [("0.1", True), ("0.2", False), ("10", False)])
def test_the_best_model_needs_an_evaluation_at_each_checkpoint(save: str, accepted: bool) -> None:
    """Fractions are rounded up, so a multiple of a fraction is no multiple of steps."""
    words = [*GIVEN, "--load_best_model_at_end", "true", "--eval_steps", "0.1", "--save_steps", save]
    if accepted:
        load_config("sft", words, environ={})
        return
    with pytest.raises(ConfigError, match="needs an evaluation at every checkpoint"):
        load_config("sft", words, environ={})
