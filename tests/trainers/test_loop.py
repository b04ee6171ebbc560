"""The loop: which step gets which rate, in which order hooks run, how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megaswift.engine.protocol import StepResult
from megaswift.trainers.hook import Hook, StepExtras
from megaswift.trainers.hooks.step_monitor import SkippedStepAndLossSpikeMonitor, TrainingDiverged
from megaswift.trainers.loop import StepTimer, train
from tests.trainers.tiny import TinyEngine, tiny_loop


class Diary(Hook):
    def __init__(self, name: str, book: list[str], act: Any = None) -> None:
        self.name, self.book, self.act = name, book, act

    def on_start(self, loop: Any) -> None:
        self.book.append(f"{self.name} start")

    def on_step(self, loop: Any, step: Any) -> None:
        self.book.append(f"{self.name} {step.number}")
        if self.act:
            self.act(step.number)

    def on_end(self, loop: Any) -> None:
        self.book.append(f"{self.name} end")

    def close(self) -> None:
        self.book.append(f"{self.name} close")


def test_hooks_run_in_order_around_the_steps() -> None:
    book: list[str] = []
    loop = tiny_loop(2, Diary("a", book), Diary("b", book))
    train(loop)
    assert book == ["a start", "b start", "a 1", "b 1", "a 2", "b 2", "a end", "b end", "a close", "b close"]
    assert loop.step == 2 and loop.data.state_dict() == {"position": 2}


def test_rates_count_from_step_zero_and_a_resumed_loop_goes_on() -> None:
    loop = tiny_loop(4)
    loop.step = 2
    train(loop)
    assert loop.engine.rates == [0.01 / 3, 0.01 / 4]


def test_the_model_learns() -> None:
    losses: list[float] = []

    class Losses(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            losses.append(step.result.loss)

    loop = tiny_loop(60, Losses())
    loop.learning_rate = lambda step, total: 0.02
    train(loop)
    assert losses[-1] < 0.7 * losses[0]


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that is not ignored: background jobs of a shell inherit an ignored SIGINT."""
    inherited = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, inherited)


def test_a_signal_ends_the_run_after_its_step(number: int) -> None:
    book: list[str] = []
    before = signal.getsignal(number)
    loop = tiny_loop(9, Diary("a", book, lambda n: os.kill(os.getpid(), number) if n == 2 else None))
    taken, following = list[int](), loop.data.next
    loop.data.next = lambda: taken.append(1) or following()
    train(loop)
    assert loop.interrupted == number and loop.step == 2
    assert book[-3:] == ["a 2", "a end", "a close"]
    assert len(taken) == 2, "a batch was sampled for a step that does not come"
    assert signal.getsignal(number) is loop.signals, "until the ranks end together"
    loop.signals.restore()
    assert signal.getsignal(number) is before


def test_hooks_are_closed_after_an_error() -> None:
    book: list[str] = []

    def fail(number: int) -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        train(tiny_loop(3, Diary("a", book, fail), Diary("b", book)))
    assert book[-2:] == ["a close", "b close"] and "a end" not in book


class Stumbling(TinyEngine):
    """Skips the steps it is told to."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad, self.number = bad, 0

    def train_batch(self, microbatches: Any, loss: Any, lr: float, *more: Any) -> StepResult:
        self.number += 1
        result = super().train_batch(microbatches, loss, lr)
        return StepResult(**{**result.__dict__, "skipped": self.number in self.bad})


def test_skipped_steps_warn_and_many_in_a_row_stop_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    loop = tiny_loop(9, SkippedStepAndLossSpikeMonitor(most=3))
    loop.engine = Stumbling({2, 3, 5, 6, 7})
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        train(loop)
    assert loop.step == 7
    assert "step 2 was skipped" in capsys.readouterr().err


def test_a_good_step_between_bad_ones_lets_the_run_go_on() -> None:
    loop = tiny_loop(9, SkippedStepAndLossSpikeMonitor(most=3))
    loop.engine = Stumbling({2, 3, 5, 6, 8, 9})
    train(loop)
    assert loop.step == 9


def test_the_times_of_a_step_add_up() -> None:
    """What a source tells is work of its own; waiting is waiting; the rest is training, told where the source has a
    name for it."""
    steps: list[Any] = []

    class Steps(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            steps.append(step)

    loop = tiny_loop(2, StepTimer(), Steps())
    following, train_batch = loop.data.next, loop.engine.train_batch
    loop.data.next = lambda: time.sleep(0.03) or following()
    loop.engine.train_batch = lambda *values: time.sleep(0.02) or train_batch(*values)
    loop.step_extras = lambda: StepExtras({"reward": 1.0}, {"generation": 0.01}, 0.01, "time/training")
    train(loop)
    for step in steps:
        assert step.result.metrics["reward"] == 1.0 and step.data_wait >= 0.02 - 1e-3
        assert 0.02 <= step.result.metrics["time/training"] == pytest.approx(step.seconds - step.data_wait - 0.01)
    assert loop.seconds["training steps"] == pytest.approx(sum(step.result.metrics["time/training"] for step in steps))
    assert loop.seconds["generation"] == pytest.approx(0.02)
