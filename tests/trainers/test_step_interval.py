"""Intervals of evaluation and saving: steps and epochs, over resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.checkpoint_hook import CheckpointHook, restore_run
from megaswift.trainers.checkpoint_store import CheckpointStore
from megaswift.trainers.evaluation import EvaluationHook
from megaswift.trainers.hook import Hook
from megaswift.trainers.loop import Loop
from megaswift.trainers.metrics_jsonl import read_lines
from megaswift.trainers.step_interval import Every, interval_of
from tests.trainers.tiny import TinySource, batch, tiny_loop


class Rows(TinySource):
    """`rows` rows an epoch, `taken` at a step."""

    rows, taken = 7, 3

    @property
    def epoch(self) -> float:
        return self.position * self.taken / self.rows


def epoch_loop(folder: Path, steps: int, every: Every, *hooks: Hook) -> Loop:
    folder.mkdir(exist_ok=True)
    evaluation = EvaluationHook(folder / "eval.jsonl", lambda: [[batch(8, 5)]], every, "label_weight")
    checkpoint = CheckpointHook(CheckpointStore(folder / "checkpoints"), every, None, {"model": {}, "config": {}})
    loop = tiny_loop(steps, evaluation, *hooks, checkpoint)
    loop.source = Rows()
    return loop


def evaluated(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(folder / "eval.jsonl")]


def saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))


def test_an_epoch_ends_with_the_step_that_takes_its_last_row(tmp_path: Path) -> None:
    """7 rows, 3 a step: 21 rows are three epochs, and the ends lie in steps 3, 5 and 7."""
    epoch_loop(tmp_path, 8, "epoch").run()
    assert evaluated(tmp_path) == [3, 5, 7, 8] and saved(tmp_path) == [3, 5, 7, 8]


def test_steps_of_more_than_an_epoch(tmp_path: Path) -> None:
    loop = epoch_loop(tmp_path, 3, "epoch")
    loop.source.taken = 15
    loop.run()
    assert evaluated(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("at", range(1, 8))
def test_a_resumed_run_has_the_same_epochs(tmp_path: Path, at: int) -> None:
    epoch_loop(tmp_path, at, "epoch").run()
    folder = tmp_path / "checkpoints" / f"step-{at}"
    for other in (tmp_path / "checkpoints").glob("step-*"):
        if other != folder:
            other.rename(tmp_path / f"earlier-{other.name}")
    second = epoch_loop(tmp_path, 8, "epoch")
    restore_run(second, folder, {})
    second.run()
    assert saved(tmp_path) == sorted({at, *(n for n in (3, 5, 7, 8) if n > at)})
    assert evaluated(tmp_path) == sorted({at, *(n for n in (3, 5, 7, 8))})


def test_a_position_ahead_of_the_steps_is_counted_once(tmp_path: Path) -> None:
    """Completions may be sampled ahead of time: the source's position goes back when a run resumes."""
    first = epoch_loop(tmp_path, 3, "epoch")
    first.run()
    second = epoch_loop(tmp_path, 5, "epoch")
    restore_run(second, tmp_path / "checkpoints" / "step-3", {})
    second.source.position = 2
    second.run()
    assert evaluated(tmp_path) == [3, 5]


def test_no_saves_what_was_interrupted_only(tmp_path: Path) -> None:
    class Stop(Hook):
        def on_step(self, loop: Loop, step: Any) -> None:
            loop.interrupted = 15 if step.number == 2 else 0
            loop.stopping = "signal" if step.number == 2 else ""

    epoch_loop(tmp_path / "whole", 4, "no").run()
    epoch_loop(tmp_path / "cut", 4, "no", Stop()).run()
    assert saved(tmp_path / "whole") == [] and saved(tmp_path / "cut") == [2]


def test_a_strategy_and_steps_together() -> None:
    assert [interval_of(*pair) for pair in ((None, 5), ("steps", 5), ("epoch", 5), ("no", None), (None, None))] == [
        5,
        5,
        "epoch",
        "no",
        None,
    ]
