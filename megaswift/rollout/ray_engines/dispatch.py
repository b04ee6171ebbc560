"""Distributes requests over engines that may end at any time. What an engine has not answered is asked of another one.

Owns the choice of the engine and the count of requests in flight. An answer must not depend on the engine that gives
it, nor on how often it was asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

Q = TypeVar("Q", contravariant=True)
A = TypeVar("A")
POLL_SECONDS = 0.1
"""Seconds between looks at what other threads have changed."""
PATIENCE_SECONDS = 5.0
"""Seconds without an answer after which engines are looked at."""


class EngineLost(Exception):
    """An engine ended before it answered."""


class Engine(Protocol[Q, A]):
    """An engine that others start again when it ends."""

    def ask(self, request: Q) -> Future[A]:
        """Returns its answer, which raises `EngineLost` if the engine ends before."""

    def back(self) -> Future[Any]:
        """Returns what is done once the engine takes requests again."""

    def interrupt(self, request: Q) -> None:
        """Lets the engine answer a request in flight with what it has."""


class Dispatcher(Generic[Q, A]):
    """Engines that several threads ask."""

    def __init__(
        self, engines: Sequence[Engine[Q, A]], at_once: int, check: Callable[[], None] = lambda: None, first: int = 0
    ) -> None:
        """Take the engines, all of which are ready.

        Args:
            engines: The engines.
            at_once: Requests of one engine at a time.
            check: Called while nothing is answered; raises an error if waiting is of no use.
            first: The engine that is asked first among equals.
        """
        self.engines = engines
        self.at_once = at_once
        self.check = check
        self.order = [*range(first, len(engines)), *range(first)]
        self.busy = [0] * len(engines)
        """Requests in flight, by engine."""
        self.away: dict[int, Future[Any]] = {}
        """Engines that have ended -> done once they are back."""
        self._lock = Lock()

    def run(self, requests: Sequence[Q], stop: Callable[[], bool] | None = None) -> list[A | None]:
        """Return the answers in the order of the requests. Once `stop` is true, engines are interrupted, and what was
        not answered is None."""
        flying: dict[Future[A], tuple[int, int]] = {}
        try:
            return self._run(requests, flying, stop)
        finally:  # what is left after an error
            for future, (_, engine) in flying.items():
                future.add_done_callback(partial(self._release, engine))

    def there(self) -> list[int]:
        """Return the engines that take requests."""
        with self._lock:
            return [engine for engine in self.order if engine not in self.away]

    def lose(self, engine: int) -> None:
        """Ask an engine that has ended for nothing until it is back."""
        with self._lock:
            if engine not in self.away:
                self.away[engine] = self.engines[engine].back()

    def _run(
        self, requests: Sequence[Q], flying: dict[Future[A], tuple[int, int]], stop: Callable[[], bool] | None
    ) -> list[A | None]:
        """`run`, with the place and the engine of each request in flight in `flying`."""
        pending = deque(range(len(requests)))
        answers: dict[int, A] = {}
        stopped = False
        heard = time.monotonic()
        while pending or flying:
            if stop is not None and not stopped and stop():
                stopped = True
                pending.clear()
                for place, engine in flying.values():
                    self.engines[engine].interrupt(requests[place])
            while pending and (free := self._take()) is not None:
                place = pending.popleft()
                flying[self.engines[free].ask(requests[place])] = (place, free)
            done = self._wait(flying, POLL_SECONDS if pending or stop is not None else PATIENCE_SECONDS)
            for future in done & flying.keys():
                place, engine = flying.pop(future)
                self._release(engine)
                try:
                    answers[place] = future.result()
                    heard = time.monotonic()
                except EngineLost:
                    self.lose(engine)
                    if not stopped:
                        pending.appendleft(place)
            if time.monotonic() - heard >= PATIENCE_SECONDS:
                heard = time.monotonic()
                self.check()
        return [answers.get(place) for place in range(len(requests))]

    def _wait(self, flying: dict[Future[A], tuple[int, int]], seconds: float) -> set[Future[Any]]:
        """Wait for an answer or an engine that is back, and return what is done."""
        with self._lock:
            returning = dict(self.away)
        awaited = [*flying, *returning.values()]
        if not awaited:  # other threads have all engines
            time.sleep(seconds)
        done, _ = wait(awaited, seconds, FIRST_COMPLETED)
        for engine, future in returning.items():
            if future in done:
                self._welcome(engine, future)
        return done

    def _take(self) -> int | None:
        """Return the engine with the fewest requests in flight, and count one more; None where all have enough."""
        with self._lock:
            there = [engine for engine in self.order if engine not in self.away and self.busy[engine] < self.at_once]
            if not there:
                return None
            engine = min(there, key=self.busy.__getitem__)
            self.busy[engine] += 1
            return engine

    def _release(self, engine: int, _: Any = None) -> None:
        with self._lock:
            self.busy[engine] -= 1

    def _welcome(self, engine: int, future: Future[Any]) -> None:
        """Ask an engine that is back again. An error is the run's: the engine does not come back."""
        with self._lock:
            if self.away.get(engine) is not future:
                return  # another thread has
            del self.away[engine]
        future.result()
