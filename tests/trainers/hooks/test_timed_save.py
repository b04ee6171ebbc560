"""Saving by the clock: which runs, when, on which ranks, and which checkpoints stay.

Covers: megaswift/trainers/hooks/checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hooks.checkpoint import CheckpointHook, TimedSaves, restore_run
from megaswift.trainers.loop import train
from megaswift.trainers.options.checkpoint import saves_by_time
from tests.parity.pool import shared
from tests.trainers.hooks.test_checkpoint import MODEL, Kill
from tests.trainers.timed_save_ranks import STEPS, Clock
from tests.trainers.tiny import tiny_loop


def at(step: int, total: int) -> Any:
    return SimpleNamespace(step=step, total_steps=total)


def test_the_first_step_is_not_part_of_the_estimate() -> None:
    """It took 500 s, the others 2 s: 98 more are 3 minutes, not 14 hours."""
    now = 0.0
    saves = TimedSaves(0, lambda: now)
    saves.start(at(0, 100))
    for step, seconds in ((1, 500.0), (2, 502.0)):
        assert saves.expected is None and not saves.is_long
        now = seconds
        saves.measure(at(step, 100))
    assert saves.expected == 502 + 98 * 2 and not saves.is_long and not saves.due


def test_a_step_of_half_an_hour_is_an_estimate() -> None:
    now = 0.0
    saves = TimedSaves(0, lambda: now)
    saves.start(at(7, 10))
    now = 2000.0
    saves.measure(at(8, 10))
    assert saves.expected == 6000 and saves.due
    saves.note_save(8, True)
    assert not saves.due
    now = 3800.0
    assert saves.due


@pytest.mark.parametrize(
    ("options", "by_time"),
    [
        ({}, True),
        ({"save_total_limit": 3}, True),
        ({"async_save": True}, True),
        ({"save_steps": 100}, False),
        ({"save_strategy": "no"}, False),
        ({"save_strategy": "epoch"}, False),
    ],
)
def test_what_was_typed_wins(options: dict[str, Any], by_time: bool) -> None:
    assert saves_by_time(SwiftConfig(**options).checkpoint) is by_time


def saved(folder: Path, steps: int, seconds_a_step: float, *hooks: Any, limit: int | None = None) -> tuple[Any, Any]:
    """A run that saves by a clock, not begun, and its clock."""
    clock = Clock(seconds_a_step)
    checkpoint = CheckpointHook(CheckpointStore(folder), None, limit, {"model": MODEL, "config": {}})
    checkpoint.timed = TimedSaves(3 << 20, lambda: clock.now)
    return tiny_loop(steps, clock, *hooks, checkpoint), clock


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_a_long_run_keeps_the_last_two_and_leaves_other_checkpoints_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_loop(1, CheckpointHook(CheckpointStore(tmp_path), 1, None, {"model": MODEL, "config": {}})))
    run, _ = saved(tmp_path, 10, 600.0)
    train(run)
    told = capsys.readouterr().err
    # 600 s a step: due after the third step, and every third from there
    assert [line.split()[2] for line in told.splitlines() if "checkpoint " in line and "MiB, " in line] == [
        *("1:", "3:", "6:", "9:", "10:"),
    ]
    assert folders(tmp_path) == ["step-1", "step-10", "step-9"]
    assert (
        "the run takes about 1:40:00: it writes a checkpoint of about 3.0 MiB every 30 minutes to "
        f"{tmp_path} and keeps the last 2 (other intervals: --save_steps N)" in told
    )


def test_a_short_run_saves_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = saved(tmp_path, 6, 600.0)
    train(run)
    assert folders(tmp_path) == ["step-6"] and "the run takes" not in capsys.readouterr().err


def test_a_typed_limit_is_the_limit(tmp_path: Path) -> None:
    run, _ = saved(tmp_path, 14, 600.0, limit=3)
    train(run)
    assert folders(tmp_path) == ["step-12", "step-14", "step-9"]


def test_a_resumed_run_goes_on_with_its_checkpoints(tmp_path: Path) -> None:
    """The one before the interruption is deleted when there are two newer ones."""
    run, _ = saved(tmp_path, 20, 600.0, Kill(5))
    train(run)
    assert folders(tmp_path) == ["step-3", "step-5"]
    second, _ = saved(tmp_path, 20, 600.0)
    restore_run(second, tmp_path / "step-5", MODEL)
    train(second)
    assert folders(tmp_path) == ["step-17", "step-20"]


@pytest.mark.process
@pytest.mark.parametrize(("slow", "expected"), [(0, [4, 8, 12, 16, 20]), (1, [20])])
def test_all_ranks_save_after_the_same_step_by_the_clock_of_rank_0(slow: int, expected: list[int]) -> None:
    """The wish travels with the counts of a batch, which is taken one step ahead: no reduction is added. A clock of
    another rank changes nothing."""
    found = shared("").run("tests.trainers.timed_save_ranks:go", slow, 3)
    assert found == [(expected, STEPS)] * 3


def test_only_saves_of_the_clock_are_deleted() -> None:
    """Older ones than the last two; those that an option or a signal asked for stay."""
    saves = TimedSaves()
    for step, by_clock in ((2, False), (5, True), (8, True), (11, False)):
        saves.note_save(step, by_clock)
    assert saves.surplus(11) == [5]
    saves.note_save(14, True)
    assert saves.surplus(14) == [5, 8] and saves.surplus(8) == []
