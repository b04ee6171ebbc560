"""Requests over engines that end at random, in threads of this process."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from megaswift.errors import Problem, UserError
from megaswift.rollout.ray_engines import dispatch
from megaswift.rollout.ray_engines.dispatch import Dispatcher, EngineLost


class Fake:
    """An engine that squares numbers, and ends now and then."""

    def __init__(self, ends: float = 0.0, seconds: float = 0.001, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.ends = ends
        self.seconds = seconds
        self.asked: list[int] = []
        self.at_once = 0
        self.most = 0
        self.interrupted: set[int] = set()
        self.stopping = threading.Event()
        self.threads = ThreadPoolExecutor(8)
        self.lock = threading.Lock()

    def ask(self, request: int) -> Future[int]:
        ends = self.random.random() < self.ends

        def work() -> int:
            with self.lock:
                self.asked.append(request)
                self.at_once += 1
                self.most = max(self.most, self.at_once)
            self.stopping.wait(self.seconds)
            with self.lock:
                self.at_once -= 1
            if ends:
                raise EngineLost("ended")
            return -request if request in self.interrupted else request * request

        return self.threads.submit(work)

    def back(self) -> Future[Any]:
        return self.threads.submit(time.sleep, 0.002)

    def interrupt(self, request: int) -> None:
        self.interrupted.add(request)
        self.stopping.set()


def test_every_request_has_one_answer_however_often_engines_end() -> None:
    """Half of all requests end an engine; nothing is asked again once it is answered."""
    engines = [Fake(0.5, seed=i) for i in range(3)]
    assert Dispatcher(engines, 4).run([*range(200)]) == [i * i for i in range(200)]
    asked = [request for engine in engines for request in engine.asked]
    assert len(asked) > 300 and {*asked} == {*range(200)}
    assert all(engine.most <= 4 for engine in engines)


def test_an_engine_that_is_away_is_not_asked() -> None:
    """Though it has nothing in flight."""

    class Away(Fake):
        away = False
        early = 0

        def ask(self, request: int) -> Future[int]:
            self.early += self.away
            return super().ask(request)

        def back(self) -> Future[Any]:
            self.away = True
            return self.threads.submit(self.returns)

        def returns(self) -> None:
            time.sleep(0.02)
            self.away = False

    engines = [Away(0.5, seed=i) for i in range(2)]
    assert Dispatcher(engines, 2).run([*range(40)]) == [i * i for i in range(40)]
    assert [engine.early for engine in engines] == [0, 0]


def test_the_engine_with_the_fewest_requests_is_asked() -> None:
    """A slow engine gets few, and ranks begin with different engines."""
    slow, fast = Fake(seconds=0.2), Fake()
    dispatcher = Dispatcher([slow, fast], 1)
    dispatcher.run([*range(50)])
    assert len(slow.asked) < 10 < len(fast.asked)
    first, second = Fake(), Fake()
    Dispatcher([first, second], 1, first=1).run([7])
    assert second.asked == [7] and not first.asked


def test_threads_share_engines() -> None:
    """No engine has more than its requests, and no thread waits for another one's end."""
    engines = [Fake(0.2, seed=i) for i in range(2)]
    dispatcher = Dispatcher(engines, 2)
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda n: dispatcher.run([n, n + 1]), range(40))]
    assert found == [[n * n, (n + 1) * (n + 1)] for n in range(40)]
    assert all(engine.most <= 2 for engine in engines) and dispatcher.busy == [0, 0]


def test_an_interruption_ends_what_is_asked_and_asks_no_more() -> None:
    engine = Fake(seconds=60.0)
    began = time.monotonic()
    found = Dispatcher([engine], 2).run([3, 4, 5], lambda: len(engine.asked) == 2)
    assert found == [-3, -4, None] and time.monotonic() - began < 10


def test_what_an_engine_loses_by_an_interruption_is_not_asked_again() -> None:
    engine = Fake(1.0, seconds=60.0)

    def stop() -> bool:
        begun = len(engine.asked) == 2
        engine.ends = 0.0 if begun else 1.0  # what is asked later is answered
        return begun

    assert Dispatcher([engine], 2).run([3, 4, 5], stop) == [None] * 3 and engine.asked == [3, 4]


def test_an_error_of_an_engine_is_the_run_s() -> None:
    class Refuses(Fake):
        def ask(self, request: int) -> Future[int]:
            return self.threads.submit(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        Dispatcher([Refuses()], 1).run([1, 2])


def test_requests_that_an_error_leaves_are_counted_until_they_are_answered() -> None:
    class Refuses(Fake):
        def ask(self, request: int) -> Future[int]:
            return super().ask(request) if request else self.threads.submit(lambda: 1 // 0)

    engine = Refuses(seconds=60.0)
    dispatcher = Dispatcher([engine], 3)
    with pytest.raises(ZeroDivisionError):
        dispatcher.run([1, 0, 2])
    assert dispatcher.busy == [2]
    engine.stopping.set()
    engine.threads.shutdown()
    assert dispatcher.busy == [0]


def test_waiting_ends_if_engines_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", 0.05)

    class Gone(Fake):
        def back(self) -> Future[Any]:
            return Future()

    def check() -> None:
        raise UserError(Problem("engines", "have ended"))

    with pytest.raises(UserError, match="have ended"):
        Dispatcher([Gone(1.0)], 1, check).run([1])


def test_waiting_ends_if_engines_end_whenever_they_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back at once, and answer nothing."""
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", 0.05)

    def check() -> None:
        raise UserError(Problem("engines", "have ended"))

    with pytest.raises(UserError, match="have ended"):
        Dispatcher([Fake(1.0)], 1, check).run([1])


def test_an_engine_that_does_not_come_back_ends_the_run() -> None:
    class Gone(Fake):
        def back(self) -> Future[Any]:
            return self.threads.submit(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        Dispatcher([Gone(1.0), Fake()], 1).run([*range(9)])
