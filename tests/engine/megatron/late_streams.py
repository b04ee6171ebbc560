"""Stand-ins for CUDA streams and events in host memory: a copy happens as late as waits allow.

What is not waited for has not happened, so code that relies on luck reads old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class Event:
    """Of a point in a stream."""

    def __init__(self) -> None:
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.at = (stream, stream.given)

    def synchronize(self) -> None:
        if self.at is not None:
            self.at[0].run(self.at[1])


class Stream:
    """Work in order, run when it is waited for."""

    current: Stream

    def __init__(self, *_: Any) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    @property
    def given(self) -> int:
        return len(self.work)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        at = event.at
        if at is not None:
            self.work.append(lambda: at[0].run(at[1]))

    def wait_stream(self, other: Stream) -> None:
        self.work.append(lambda until=other.given: other.run(until))  # type: ignore[misc]


def install(monkeypatch: pytest.MonkeyPatch, module: Any) -> Stream:
    """In place of torch.cuda's; copies by `module._copy_async` go to the current stream. Returns the main stream."""
    main = Stream.current = Stream()

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    def copy(target: Tensor, source: Tensor) -> None:
        def late() -> None:
            with torch.no_grad():
                target.copy_(source)

        Stream.current.work.append(late)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current)
    monkeypatch.setattr(module, "_copy_async", copy)
    return main
