"""TensorBoard holds the lines of metrics.jsonl, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.trainers.flops import FlopRule
from megaswift.trainers.metrics import Metrics, Speed, read_lines
from megaswift.trainers.trackers import TensorBoard, numbers, trackers
from tests.trainers.tiny import tiny_loop


def test_events_are_the_lines(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_loop(4, Metrics(tmp_path / "m.jsonl", 2, Speed(FlopRule(1, 1), 1, 1), "label_weight"), TensorBoard(tmp_path / "runs")).run()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    lines = read_lines(tmp_path / "m.jsonl")
    for name in ("loss", "grad_norm", "tokens", "token_accuracy"):
        found = [(e.step, e.value) for e in events.Scalars(f"train/{name}")]
        assert [s for s, _ in found] == [2, 4]
        assert [v for _, v in found] == pytest.approx([line[name] for line in lines])
    assert "train/mfu" not in events.Tags()["scalars"]


def test_only_numbers_are_sent() -> None:
    line = {"step": 3, "loss": 1.5, "mfu": None, "text": "x", "flag": True, "tokens": 7}
    assert numbers("train", line) == {"train/loss": 1.5, "train/tokens": 7}


def test_report_to_chooses(tmp_path: Path) -> None:
    assert [type(h).__name__ for h in trackers(("tensorboard",), tmp_path, {})] == ["TensorBoard"]
    assert trackers((), tmp_path, {}) == []
    assert [type(h).__name__ for h in trackers(("wandb",), tmp_path, {})] == ["WandB"]
