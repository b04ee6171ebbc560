"""Requests of many clients to one model: what waits together with equal sampling is answered together; the rest waits
its turn.

A request of more answers than a batch has is answered in several, one after the other. A batch runs to its end; what
arrives meanwhile waits. One that fails before it has said anything is tried again client by client, so that a request
fails alone. A request with a seed of its own runs alone, so that its answer depends on nothing else. One thread owns
the model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from megaswift.errors import UserError
from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams, Generator

SPREAD = 0x9E3779B97F4A7C15
"""Between the seeds of one request's batches: 2^64 divided by the golden ratio, far from seeds that people choose."""


class QueueFull(Exception):
    """Too many answers are waiting already."""


@dataclass
class QueuedRequest:
    """Answers that belong together: the choices of one HTTP request."""

    requests: Sequence[AnswerRequest]
    sampling: GenerationParams
    done: Future[list[Answer]] = field(default_factory=Future)

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        for request in self.requests:
            request.cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether there is nothing left to answer."""
        return all(request.cancelled for request in self.requests)


class RequestQueue:
    """The waiting line before a generator, and the thread that serves it."""

    def __init__(
        self, generate: Callable[[Sequence[AnswerRequest], GenerationParams], list[Answer]], batch: int, waiting: int
    ) -> None:
        self._generate, self.batch, self.waiting = generate, batch, waiting
        self._line: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="generate", daemon=True)
        self._running: list[QueuedRequest] = []

    @classmethod
    def before(cls, generator: Generator, batch: int, waiting: int) -> RequestQueue:
        """A line whose thread runs."""
        line = cls(generator.generate, batch, waiting)
        line.start()
        return line

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def admit(self, answers: int) -> None:
        """Full where so many more answers would not be taken."""
        with self._changed:
            self._admit(answers)

    def _admit(self, answers: int) -> None:
        if self._closed:
            raise QueueFull("the server is stopping")
        ahead = sum(len(t.requests) for t in self._line)
        if ahead and ahead + answers > self.waiting:
            raise QueueFull(f"{ahead} answers are waiting, at most {self.waiting} may")

    def submit(self, ticket: QueuedRequest) -> QueuedRequest:
        """Put at the end of the line; Full where it is too long."""
        with self._changed:
            self._admit(len(ticket.requests))
            self._line.append(ticket)
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """End every answer at its next token."""
        with self._changed:
            self._closed = True
            for ticket in [*self._line, *self._running]:
                ticket.cancel()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> list[QueuedRequest]:
        """The next batch: the first in line and those behind it that may go with it."""
        first = self._line.popleft()
        chosen, count = [first], len(first.requests)
        if first.sampling.seed is None:
            for ticket in list(self._line):
                if ticket.sampling == first.sampling and count + len(ticket.requests) <= self.batch:
                    self._line.remove(ticket)
                    chosen.append(ticket)
                    count += len(ticket.requests)
        return chosen

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                self._running = self.take()
            self._answer([t for t in self._running if t.done.set_running_or_notify_cancel()])

    def _batches(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        """Answers, as many at a time as a batch has. Each further batch of a request with a seed has another one that
        follows from it: the same seed would draw the same answers again."""
        found: list[Answer] = []
        for number, start in enumerate(range(0, len(requests), max(1, self.batch))):
            drawn = sampling
            if number and sampling.seed is not None:
                drawn = replace(sampling, seed=(sampling.seed + number * SPREAD) % 2**63)
            found += self._generate(requests[start : start + max(1, self.batch)], drawn)
        return found

    def _answer(self, tickets: Sequence[QueuedRequest]) -> None:
        wanted = [t for t in tickets if not t.cancelled]
        for ticket in tickets:
            if ticket not in wanted:
                ticket.done.set_result([Answer("", 0, "cancelled") for _ in ticket.requests])
        if not wanted:
            return
        try:
            found = self._batches([r for t in wanted for r in t.requests], wanted[0].sampling)
        except (
            UserError,
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
        ) as error:  # the model's: these clients hear of it, others go on
            alone = len(wanted) > 1 and not any(r.begun for t in wanted for r in t.requests)  # of one of them, perhaps
            for ticket in wanted:
                if alone:
                    self._answer([ticket])
                else:
                    ticket.done.set_exception(error)
            return
        for ticket in wanted:
            ticket.done.set_result(found[: len(ticket.requests)])
            found = found[len(ticket.requests) :]
