"""Wall time by part: blocks of one part add up, a block that fails counts too, other parts stay.

Covers: megaswift/trainers/loop.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.engine.protocol import StepResult
from megaswift.trainers import hook
from megaswift.trainers import loop as loop_module
from megaswift.trainers.hook import StepExtras, StepRecord


def test_blocks_add_up_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.5, 20.0, 21.0, 30.0, 34.0))
    monkeypatch.setattr(hook, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seconds = {"export": 1.0}
    with hook.timed(seconds, "data"):
        pass
    with pytest.raises(KeyError), hook.timed(seconds, "data"):
        raise KeyError
    with hook.timed(seconds, "export"):
        pass
    assert seconds == {"data": 3.5, "export": 5.0}


def test_a_step_is_waiting_the_source_s_work_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 10 s in all, the batch after 4, of which 3 were the source's work; 2 more of it came later."""
    clock = iter((100.0, 100.0, 104.0, 110.0, 200.0, 200.0, 201.0, 204.0))
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    loop: Any = SimpleNamespace(seconds={"generation": 1.0})
    timer = loop_module.StepTimer()

    def step(extras: StepExtras) -> tuple[Any, ...]:
        record = StepRecord(1, 0.0, 0.1, StepResult(0.5), extras=extras)
        timer.on_step_begin(loop)
        timer.on_batch_begin(loop)
        timer.on_batch(loop)
        timer.on_step(loop, record)
        return record.seconds, record.data_wait, record.result.metrics

    assert step(StepExtras({}, {"generation": 3.0, "critic": 2.0}, 3.0, "time/training")) == (
        10.0,
        1.0,
        {"time/training": 4.0},
    )
    assert step(StepExtras()) == (4.0, 1.0, {})
    assert loop.seconds == {"generation": 4.0, "critic": 2.0, "waiting for data": 2.0, "training steps": 7.0}
