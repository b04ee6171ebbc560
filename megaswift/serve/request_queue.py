"""The request queue before one model: waiting requests with equal sampling parameters form a batch; the others wait.

A request of more answers than a batch has is answered in several, one after the other. A batch runs to its end; what
arrives meanwhile waits. A batch that fails before its first token is retried request by request, so that one request
fails alone. A request with a seed of its own runs alone, so that its answer depends on nothing else. One thread owns
the model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from megaswift.errors import UserError
from megaswift.inference.generator import Answer, GenerationParams, Generator

SPREAD = 0x9E3779B97F4A7C15
"""Between the seeds of one request's batches: 2^64 divided by the golden ratio, far from seeds that people choose."""


class QueueFull(Exception):
    """The queue is at its limit, or closed."""


@dataclass
class QueuedRequest:
    """Answers that belong together: the choices of one HTTP request."""

    requests: Sequence[Any]
    """`AnswerRequest`, or the tokens of texts that are embedded, scored or classified."""
    sampling: GenerationParams = GenerationParams()
    done: Future[list[Any]] = field(default_factory=Future)
    weight: int | None = None
    """What counts for the limit of the queue; None: the number of answers."""

    @property
    def size(self) -> int:
        """What counts for the limit of the queue."""
        return len(self.requests) if self.weight is None else self.weight

    def cancel(self) -> None:
        """Cancels all answers: the client has disconnected."""
        for request in self.requests:
            request.cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether there is nothing left to answer."""
        return all(request.cancelled for request in self.requests)


class RequestQueue:
    """A bounded queue before a generator, and the thread that serves it."""

    def __init__(
        self, generate: Callable[[Sequence[Any], GenerationParams], list[Any]], batch: int, waiting: int
    ) -> None:
        self._generate = generate
        self.batch = batch
        self.waiting = waiting
        self._line: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="generate", daemon=True)
        self._running: list[QueuedRequest] = []

    @classmethod
    def before(cls, generator: Generator, batch: int, waiting: int) -> RequestQueue:
        """A queue with its thread started."""
        line = cls(generator.generate, batch, waiting)
        line.start()
        return line

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def admit(self, answers: int) -> None:
        """QueueFull where `answers` more would exceed the limit."""
        with self._changed:
            self._admit(answers)

    def _admit(self, answers: int) -> None:
        if self._closed:
            raise QueueFull("the server is stopping")
        ahead = sum(t.size for t in self._line)
        if ahead and ahead + answers > self.waiting:
            raise QueueFull(f"{ahead} answers are waiting; the limit is {self.waiting}")

    def submit(self, ticket: QueuedRequest) -> QueuedRequest:
        """Appends a request; QueueFull where the limit is exceeded."""
        with self._changed:
            self._admit(ticket.size)
            self._line.append(ticket)
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """Cancels every answer and joins the thread."""
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
        chosen = [first]
        count = len(first.requests)
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

    def _batches(self, requests: Sequence[Any], sampling: GenerationParams) -> list[Any]:
        """Answers, as many at a time as a batch has. Each further batch of a request with a seed has another one that
        follows from it: the same seed would draw the same answers again."""
        answered: list[Any] = []
        for number, start in enumerate(range(0, len(requests), max(1, self.batch))):
            drawn = sampling
            if number and sampling.seed is not None:
                drawn = replace(sampling, seed=(sampling.seed + number * SPREAD) % 2**63)
            answered += self._generate(requests[start : start + max(1, self.batch)], drawn)
        return answered

    def _answer(self, tickets: Sequence[QueuedRequest]) -> None:
        wanted = [t for t in tickets if not t.cancelled]
        for ticket in tickets:
            if ticket not in wanted:
                ticket.done.set_result([Answer("", 0, "cancelled") for _ in ticket.requests])
        if not wanted:
            return
        try:
            answered = self._batches([r for t in wanted for r in t.requests], wanted[0].sampling)
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
            ticket.done.set_result(answered[: len(ticket.requests)])
            answered = answered[len(ticket.requests) :]
