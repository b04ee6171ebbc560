"""Evaluation: when, over what, and that training does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.trainers.evaluation import EvaluationHook
from megaswift.trainers.hook import Hook
from megaswift.trainers.metrics_jsonl import read_lines
from tests.trainers.tiny import TinyEngine, batch, tiny_loop

HELD = [[batch(8, 5, 91)], [batch(9, 2, 92)], [batch(7, 6, 93)]]


def hook(folder: Path, every: int | None) -> EvaluationHook:
    return EvaluationHook(folder / "eval.jsonl", lambda: HELD, every, "label_weight")


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (None, [7]), (7, [7])])
def test_at_the_interval_and_once_at_the_end(tmp_path: Path, every: int | None, steps: list[int]) -> None:
    tiny_loop(7, hook(tmp_path, every)).run()
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == steps


def test_before_the_first_step(tmp_path: Path) -> None:
    """Of the model as it was loaded; a resumed run does not repeat it."""
    first = EvaluationHook(tmp_path / "eval.jsonl", lambda: HELD, 2, "label_weight", True)
    tiny_loop(3, first).run()
    lines = read_lines(tmp_path / "eval.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 3] and lines[0]["loss"] != lines[1]["loss"]
    again = tiny_loop(3, EvaluationHook(tmp_path / "eval.jsonl", lambda: HELD, 2, "label_weight", True))
    again.step = 2
    again.run()
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == [0, 2, 3]


def test_the_loss_is_that_of_all_held_out_labels(tmp_path: Path) -> None:
    loop = tiny_loop(2, hook(tmp_path, None))
    loop.run()
    line = read_lines(tmp_path / "eval.jsonl")[0]
    model, total = loop.engine.model.eval(), 0.0
    with torch.no_grad():
        for [b] in HELD:
            logits = model(b.input_ids)[0]
            total += float(
                torch.nn.functional.cross_entropy(logits, b.labels[0], reduction="none")[b.loss_weights[0] == 1].sum()
            )
    assert line["loss"] == pytest.approx(total / 13, rel=1e-6)
    assert (line["tokens"], line["label_tokens"], line["batches"]) == (24, 13, 3)


def test_training_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    def losses(*hooks: Hook) -> list[float]:
        seen: list[float] = []

        class Look(Hook):
            def on_step(self, loop: Any, step: Any) -> None:
                seen.append(step.result.loss)

        tiny_loop(6, *hooks, Look()).run()
        return seen

    assert losses(hook(tmp_path, 2)) == losses()


def test_a_resume_drops_later_evaluations(tmp_path: Path) -> None:
    tiny_loop(6, hook(tmp_path, 2)).run()
    loop = tiny_loop(5, hook(tmp_path, 2))
    loop.step = 3
    loop.run()
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == [2, 4, 5]


def test_labels_without_weight_give_null(tmp_path: Path) -> None:
    class NoLabels(TinyEngine):
        def evaluate(self, microbatches: Any, loss: Any) -> Any:
            result = super().evaluate(microbatches, loss)
            return type(result)(float("nan"), {}, counts={"label_weight": 0.0})

    loop = tiny_loop(1, hook(tmp_path, None))
    loop.engine = NoLabels()
    loop.run()
    assert read_lines(tmp_path / "eval.jsonl")[0]["loss"] is None
