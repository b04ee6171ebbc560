"""Actors of this process for tests: real engines whose calls end them at random, and their board."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from megaswift.rollout.ray_engines.actor import EngineBoard, SamplerEngine
from megaswift.rollout.ray_engines.cluster import EngineGroup, EngineSettings

ONE = threading.Lock()
"""Models are built one at a time: that patches torch for the whole process."""
STARTED: list[Actor] = []
"""Those whose threads have not ended."""


class Reference:
    """What a call of an actor returns."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class Actor:
    """An object whose methods are called as an actor's. With `ends`, such a share of its calls ends it before or after
    its work, and it is made anew."""

    def __init__(self, make: Callable[[], Any], ends: float = 0.0, seed: int = 0) -> None:
        self.make = make
        self.inner = make()
        self.ends = ends
        self.random = random.Random(seed)
        self.thread = ThreadPoolExecutor(1)
        self.control = ThreadPoolExecutor(1)
        STARTED.append(self)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any, control: bool = False) -> Reference:
            return Reference((self.control if control else self.thread).submit(self._call, name, arguments))

        def options(concurrency_group: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: remote(*arguments, control=bool(concurrency_group)))

        return SimpleNamespace(remote=remote, options=options)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        ends = {"ask": self.ends, "load": self.ends, "ready": self.ends / 2}.get(name, 0.0)
        drawn = self.random.random()
        if drawn < ends / 2:
            self.inner = self.make()
            raise ActorUnavailableError("restarting", None)
        with nullcontext() if name == "interrupt" else ONE:
            result = getattr(self.inner, name)(*arguments)
        if drawn < ends:
            self.inner = self.make()
            raise ActorUnavailableError("restarting", None) if name == "ready" else ActorDiedError
        return result


def end_actors(monkeypatch: Any) -> None:
    """Make no more calls, and wait for those under way and for timers that would ask again: no thread of a test goes on
    beside the next one, in which Ray is initialized again."""
    from megaswift.rollout.ray_engines import sampler

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    while STARTED:
        actor = STARTED.pop()
        actor.thread.shutdown()
        actor.control.shutdown()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function.__module__ == sampler.__name__:
            thread.join()


def engine_group(settings: EngineSettings, monkeypatch: Any, ends: float = 0.0) -> EngineGroup:
    """Engines in threads; `ray.get` waits for their calls."""
    from megaswift.rollout.ray_engines import actor, sampler

    board = Actor(lambda: EngineBoard(settings.count))
    monkeypatch.setattr(actor, "find_board", lambda: board)
    monkeypatch.setattr("ray.get", lambda reference: reference.future().result())
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(sampler, "RETRY_SECONDS", 0.01)
    made = [
        Actor(lambda n=n: SamplerEngine(n, settings.backend, settings.folder, settings.options, "log"), ends, n)  # type: ignore[misc]
        for n in range(settings.count)
    ]
    group = EngineGroup(board, made, None, False)
    monkeypatch.setattr(group, "without_node", lambda: 0)
    return group
