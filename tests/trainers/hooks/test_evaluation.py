"""Evaluation: when, over what, and that training does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.engine.protocol import Addends
from megaswift.losses.contract import Batch, LossTerm, MeanMetric
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.hook import Hook
from megaswift.trainers.hooks.evaluation import AddendsOfBatches, EvaluationHook
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.loop import train
from tests.trainers.tiny import TinyEngine, batch, tiny_loop

HELD = [[batch(8, 5, 91)], [batch(9, 2, 92)], [batch(7, 6, 93)]]


def hook(folder: Path, every: int | None) -> EvaluationHook:
    return EvaluationHook(folder / "eval.jsonl", lambda: HELD, every, "label_weight")


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (None, [7]), (7, [7])])
def test_at_the_interval_and_once_at_the_end(tmp_path: Path, every: int | None, steps: list[int]) -> None:
    train(tiny_loop(7, hook(tmp_path, every)))
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == steps


def test_hooks_hear_of_each_batch(tmp_path: Path) -> None:
    heard: list[int] = []

    class Listener(Hook):
        def on_evaluation_batch(self, run: object, batches: int) -> None:
            heard.append(batches)

    train(tiny_loop(7, hook(tmp_path, 4), Listener()))
    assert heard == [1, 2, 3, 1, 2, 3]


def test_before_the_first_step(tmp_path: Path) -> None:
    """Of the model as it was loaded; a resumed run does not repeat it."""
    first = EvaluationHook(tmp_path / "eval.jsonl", lambda: HELD, 2, "label_weight", True)
    train(tiny_loop(3, first))
    lines = read_lines(tmp_path / "eval.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 3] and lines[0]["loss"] != lines[1]["loss"]
    again = tiny_loop(3, EvaluationHook(tmp_path / "eval.jsonl", lambda: HELD, 2, "label_weight", True))
    again.step = 2
    train(again)
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == [0, 2, 3]


def test_the_loss_is_that_of_all_held_out_labels(tmp_path: Path) -> None:
    loop = tiny_loop(2, hook(tmp_path, None))
    train(loop)
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


class TwoTerms(CrossEntropy):
    """A term per label, and one per row, as losses of pairs have; a mean over tokens."""

    def counts(self, batch: Batch) -> dict[str, float]:
        return {**super().counts(batch), "rows": float(batch.input_ids.shape[0])}

    def __call__(self, outputs: Any, batch: Batch) -> Any:
        terms, metrics = super().__call__(outputs, batch)
        whole = LossTerm("rows", outputs.logprobs.sum(), "rows", 0.25)
        seen = {"seen": MeanMetric(outputs.logprobs.sum(), float(batch.valid.sum()))}
        return [*terms, whole], {**metrics, **seen}


def test_terms_of_different_counts(tmp_path: Path) -> None:
    """Each divided once by its count over the whole set, however it is cut: batches differ in labels, not in rows."""
    loop = tiny_loop(2, hook(tmp_path, None))
    loop.loss = TwoTerms()
    train(loop)
    line = read_lines(tmp_path / "eval.jsonl")[0]
    at_once = loop.engine.evaluate([b for batches in HELD for b in batches], loop.loss)
    assert line["loss"] == pytest.approx(at_once.loss, rel=1e-6)
    assert line["seen"] == pytest.approx(at_once.metrics["seen"], rel=1e-6)
    assert line["rows"] == pytest.approx(at_once.addends.terms["rows"][0] / len(HELD), rel=1e-6)


def test_batches_are_added_up_by_hand() -> None:
    added, apart = AddendsOfBatches(), {"margin": ("chosen", "rejected")}
    added.add(Addends({"a": (6.0, 3.0), "b": (1.0, 2.0)}, {"chosen": (4.0, 2.0), "rejected": (3.0, 1.0)}, apart))
    added.add(Addends({"a": (0.0, 1.0), "b": (5.0, 1.0)}, {"chosen": (0.0, 2.0), "rejected": (0.0, 0.0)}, apart))
    assert added.loss == 6 / 4 + 6 / 3
    assert added.metrics == {"a": 1.5, "b": 2.0, "chosen": 1.0, "rejected": 3.0, "margin": -2.0}


def test_training_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    def losses(*hooks: Hook) -> list[float]:
        seen: list[float] = []

        class Look(Hook):
            def on_step(self, loop: Any, step: Any) -> None:
                seen.append(step.result.loss)

        train(tiny_loop(6, *hooks, Look()))
        return seen

    assert losses(hook(tmp_path, 2)) == losses()


def test_a_resume_drops_later_evaluations(tmp_path: Path) -> None:
    train(tiny_loop(6, hook(tmp_path, 2)))
    loop = tiny_loop(5, hook(tmp_path, 2))
    loop.step = 3
    train(loop)
    assert [line["step"] for line in read_lines(tmp_path / "eval.jsonl")] == [2, 4, 5]


def test_labels_without_weight_give_null(tmp_path: Path) -> None:
    class NoLabels(TinyEngine):
        def evaluate(self, microbatches: Any, loss: Any) -> Any:
            result = super().evaluate(microbatches, loss)
            return type(result)(float("nan"), {}, counts={"label_weight": 0.0})

    loop = tiny_loop(1, hook(tmp_path, None))
    loop.engine = NoLabels()
    train(loop)
    assert read_lines(tmp_path / "eval.jsonl")[0]["loss"] is None
