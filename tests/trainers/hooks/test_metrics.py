"""metrics.jsonl: what every field means, by hand values; what is kept and dropped on a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megaswift import distributed
from megaswift.engine.protocol import GlobalBatchCounts, StartedCount, StepResult
from megaswift.losses.contract import Batch
from megaswift.models.flops import StepFlopFormula
from megaswift.trainers.hook import Hook, StepRecord
from megaswift.trainers.hooks.metrics import (
    JsonLinesHook,
    MetricsJsonlHook,
    ThroughputFormula,
    read_lines,
    strict_json_text,
    truncate_lines_after,
)
from megaswift.trainers.loop import length_squares, train
from tests.trainers.tiny import batch, tiny_loop

FIELDS = [
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "label_tokens",
    "step_time",
    "data_wait",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "memory_gib",
]


def step(number: int, loss: float, weight: float, **result: object) -> StepRecord:
    made = StepResult(
        loss,
        {"token_accuracy": loss / 10},
        2.0 * number,
        tokens=100,
        label_tokens=int(weight),
        counts={"label_weight": weight},
        **result,
    )  # type: ignore[arg-type]
    return StepRecord(number, number / 4, 0.1 / number, made, seconds=0.5 * number, data_wait=0.1, squares=500)


RULE = StepFlopFormula(parameters=7_000_000_000, attention=1_000_000)


def metrics(
    path: Path, every: int, peak: float | None = None, beside: tuple[StepFlopFormula, ...] = ()
) -> MetricsJsonlHook:
    return MetricsJsonlHook(
        path, every, ThroughputFormula([RULE, *beside], devices=4, peak_tflops=peak), "label_weight"
    )


def feed(hook: MetricsJsonlHook, *steps: StepRecord, total: int = 99) -> list[dict]:
    loop = tiny_loop(total)
    hook.on_start(loop)
    for s in steps:
        hook.on_step(loop, s)
    hook.close()
    return read_lines(hook.path)


def test_one_line_holds_the_means_and_sums_of_its_steps(tmp_path: Path) -> None:
    lines = feed(metrics(tmp_path / "m.jsonl", 2, peak=1000.0), step(1, 3.0, 10), step(2, 5.0, 30), step(3, 7.0, 1))
    assert len(lines) == 1  # the third step has no line yet
    line = lines[0]
    assert list(line) == [*FIELDS, "token_accuracy"]
    assert line["step"] == 2 and line["epoch"] == 0.5
    # the objective over both global batches, not the mean of two means
    assert line["loss"] == (3.0 * 10 + 5.0 * 30) / 40
    assert line["token_accuracy"] == pytest.approx(0.45)
    assert line["grad_norm"] == 4.0 and line["learning_rate"] == 0.05  # of the logged step
    assert line["tokens"] == 200 and line["label_tokens"] == 40  # sums
    assert line["step_time"] == 0.75 and line["data_wait"] == pytest.approx(0.1)  # 1.5 s over two steps
    assert line["tokens_per_second"] == pytest.approx(200 / 1.5)
    assert line["tokens_per_second_per_device"] == pytest.approx(200 / 1.5 / 4)
    flops = 6 * 7e9 * 200 + 6 * 1e6 * 1000
    assert line["tflops_per_device"] == pytest.approx(flops / 1.5 / 4 / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops_per_device"] / 1000)
    assert line["memory_gib"] > 0.01


def test_the_first_step_may_have_a_line(tmp_path: Path) -> None:
    """Of itself; the next line has the steps after it."""
    hook = metrics(tmp_path / "m.jsonl", 3)
    hook.first_step = True
    lines = feed(hook, step(1, 3.0, 10), step(2, 5.0, 30), step(3, 7.0, 10))
    assert [line["step"] for line in lines] == [1, 3] and lines[0]["loss"] == 3.0
    assert lines[1]["loss"] == (5.0 * 30 + 7.0 * 10) / 40


def test_times_of_several_ranks_travel_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 1 of 3: a line has the times of the steps before its own, memory of now; the last one those of all."""
    others = [[0.3, 0.01, 7.0], [0.0] * 3, [0.2, 0.09, 5.0]]
    sent: list[list[float]] = []

    def summed(slots: Sequence[float]) -> list[float]:
        assert [round(x, 9) for i, x in enumerate(slots) if i // 3 != 1] == [0.0] * 6
        sent.append([round(x, 6) for x in slots[3:5]])
        return [a + b for a, b in zip(slots, sum(others, []), strict=True)]

    def start_count(microbatches: Sequence[Batch], loss: object, further: Sequence[float]) -> StartedCount:
        assert not microbatches
        return lambda: GlobalBatchCounts({}, 0, 0, 0, tuple(summed(further)))

    monkeypatch.setattr(distributed, "global_world_size", lambda: 3)
    monkeypatch.setattr(distributed, "global_rank", lambda: 1)
    monkeypatch.setattr(distributed, "all_sum", summed)
    hook, loop = metrics(tmp_path / "m.jsonl", 1), tiny_loop(4)
    loop.engine.start_count = start_count  # type: ignore[method-assign]
    lines = []
    for number, wait in ((1, 0.1), (2, 0.5), (3, 0.25), (4, 0.75)):
        loop.step = number - 1
        hook.on_launched(loop)
        record = replace(step(number, 3.0, 10, compute_seconds=number / 100), data_wait=wait)
        hook.window.add(record, 10)
        hook.own.add(record)
        lines.append(hook.line(record))
        hook.window = type(hook.window)()
    assert sent == [[0.0, 0.0], [0.1, 0.01], [0.5, 0.02], [0.5, 0.035]], "the last line has two steps"
    assert [line["data_wait"] for line in lines] == [0.1, 0.3, 0.5, 0.5]
    assert [line.get("rank_step_time_slowest") for line in lines] == [None, 2, 2, 2]
    assert [line.get("rank_step_time_median") for line in lines] == [None, 0.01, 0.02, pytest.approx(0.035)]
    assert all(line["memory_gib"] >= 7 for line in lines)


def test_models_that_train_on_the_same_tokens_add_up(tmp_path: Path) -> None:
    """A critic of 2 parameters and 5 of attention with half a pass beside: 6 x 2 x 200 + 6 x 5 x 1000 + 2 x 0.5 x (2 x
    200 + 5 x 1000)."""
    critic = StepFlopFormula(2_000_000_000, 5_000_000_000, 0.5, 2_000_000_000)
    alone, both = (
        feed(metrics(tmp_path / f"{len(some)}.jsonl", 2, beside=some), step(1, 3.0, 10), step(2, 5.0, 30))[0]
        for some in ((), (critic,))
    )
    more = both["tflops_per_device"] - alone["tflops_per_device"]
    assert more * 1e12 * 4 * 1.5 == pytest.approx((6 * 2 * 200 + 6 * 5 * 1000 + 2 * 200 + 5 * 1000) * 1e9)


def test_mfu_is_null_without_a_peak_and_full_precision_is_kept(tmp_path: Path) -> None:
    hook = metrics(tmp_path / "m.jsonl", 1)
    feed(hook, step(1, 1 / 3, 7))
    text = hook.path.read_text()
    assert json.loads(text)["mfu"] is None
    assert json.loads(text)["loss"] == 1 / 3


def test_the_last_step_has_a_line_whatever_the_interval(tmp_path: Path) -> None:
    lines = feed(metrics(tmp_path / "m.jsonl", 4), *[step(i, 1.0, 1) for i in range(1, 7)], total=6)
    assert [line["step"] for line in lines] == [4, 6]
    assert lines[1]["tokens"] == 200


def test_a_step_without_labels_weighs_nothing(tmp_path: Path) -> None:
    lines = feed(metrics(tmp_path / "m.jsonl", 2), step(1, 3.0, 10), step(2, float("nan"), 0))
    assert lines[0]["loss"] == 3.0 and "skipped" not in lines[0]


def test_skipped_steps_are_counted_and_nan_is_null(tmp_path: Path) -> None:
    lines = feed(metrics(tmp_path / "m.jsonl", 2), step(1, float("nan"), 10, skipped=True), step(2, 3.0, 10))
    assert lines[0]["loss"] is None and lines[0]["skipped"] == 1


def test_lines_are_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []

    class Look(Hook):
        def on_step(self, loop, step) -> None:  # noqa: ANN001
            seen.append(len(read_lines(tmp_path / "m.jsonl")))

    train(tiny_loop(3, metrics(tmp_path / "m.jsonl", 1), Look()))
    assert seen == [1, 2, 3]


def test_a_window_cut_by_a_checkpoint_goes_on(tmp_path: Path) -> None:
    steps = [step(1, 3.0, 10), step(2, 5.0, 30)]
    whole = feed(metrics(tmp_path / "whole.jsonl", 2), *steps)[0]
    first, second = metrics(tmp_path / "a.jsonl", 2), metrics(tmp_path / "b.jsonl", 2)
    assert feed(first, steps[0]) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    cut = feed(second, steps[1])[0]
    assert {k: v for k, v in cut.items() if k != "memory_gib"} == {k: v for k, v in whole.items() if k != "memory_gib"}


def test_lines_past_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        "".join(strict_json_text({"step": i, "loss": i / 3}) + "\n" for i in (2, 4, 6, 8)) + '{"step": 10, "lo'
    )
    before = path.read_text().splitlines()
    assert truncate_lines_after(path, 4) == 2
    assert path.read_text().splitlines() == before[:2]  # kept lines keep every digit; the torn one is gone
    assert truncate_lines_after(path, 4) == 0
    assert truncate_lines_after(tmp_path / "none.jsonl", 5) == 0


def test_a_resumed_run_leaves_earlier_lines_as_they_were(tmp_path: Path) -> None:
    """Words of any alphabet, a line separator among them, and what is no number."""
    first = JsonLinesHook(tmp_path / "c.jsonl")
    first.write({"step": 1, "completion": "żółw \u2028 四"}, {"step": 1, "reward": math.nan})
    before = first.path.read_bytes()
    first.write({"step": 2, "completion": "x"})
    loop = tiny_loop(9)
    loop.step = 1
    JsonLinesHook(first.path).on_start(loop)
    assert (
        first.path.read_bytes()
        == before
        == '{"step": 1, "completion": "żółw \u2028 四"}\n{"step": 1, "reward": null}\n'.encode()
    )


def test_documents_count_by_the_square_of_their_own_length() -> None:
    b = batch(5, 2, width=9)
    assert length_squares(b) == 25
    packed = batch(9, 3)
    positions = packed.positions.clone()
    positions[0] = positions.new_tensor([0, 1, 2, 3, 0, 1, 2, 0, 0])
    packed = type(packed)(packed.input_ids, packed.labels, packed.loss_weights, positions, packed.valid)
    assert length_squares(packed) == 16 + 9 + 1 + 1
