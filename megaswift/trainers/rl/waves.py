"""Leads many conversations at a time, so that a slow environment holds no other.

Owns when the sampler is asked, and the threads in which environments are called. A sampler that takes prompts one by
one, a server's, is asked as soon as a conversation is ready. Another one is given all that are ready, a wave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch

from megaswift.rollout.sampler import Completion, Sampler, SamplingParams, SinglePromptSampler

T = TypeVar("T")

SEATS = 512
"""Conversations at a time; where one ends, the next one begins."""
GRACE = 0.1
"""Seconds that a wave waits at least for environments that have not answered."""
LEAVING = 5.0
"""Seconds in which environments may be closed after a conversation has failed."""


@dataclass(frozen=True)
class Ask:
    """Asks the sampler for a turn."""

    context: Sequence[int]
    room: int
    """Maximum tokens."""
    seed: int
    greedy: bool = False
    """The likeliest tokens, whatever the temperature."""


Call = Callable[[], Any]


@dataclass(frozen=True)
class Leave:
    """Names the call that a conversation makes if another one fails; it is made in the same thread."""

    call: Call


Talk = Generator[Ask | Leave | Call, Any, T]
"""A conversation: yields `Ask`, to which a completion is sent, and calls of an environment, to which their results are
sent; returns what it has become. All calls of a conversation are made in one thread."""
Asker = Callable[[Ask], Future[Completion]]
"""Asks the sampler from any thread while a call is under way."""
Begin = Callable[[int, Asker], Talk[T]]
"""Makes the conversation of a number."""


def lead_conversations(begin: Begin[T], count: int, sampler: Sampler, sampling: SamplingParams) -> list[T]:
    """Lead conversations to their ends, and return what they have become.

    Args:
        begin: Makes the conversation of a number.
        count: How many there are.
        sampler: Writes the turns; it is called in the calling thread, unless it takes prompts one by one.
        sampling: How tokens are drawn; each turn has its own maximum length.

    Raises:
        BaseException: Whatever the first conversation to fail raises. Calls under way are left to themselves; after
            them, the others are left (`Leave`), for which there are `LEAVING` seconds.
    """
    leader = _Leader(begin, count, sampler, sampling)
    try:
        leader.start()
        while wave := leader.next_wave():
            for greedy in (False, True):
                part = [one for one in wave if one.ask.greedy == greedy]
                if part:
                    leader.sample(part, sampler)
    finally:
        leader.close()
    return [leader.found[number] for number in range(count)]


@dataclass(eq=False)
class _Seat:
    """A thread that makes the calls of a conversation, and after it of another one."""

    number: int = -1
    """Of the conversation."""
    talk: Any = None
    leave: Call | None = None
    calls: SimpleQueue[Call | None] = field(default_factory=SimpleQueue)
    thread: Thread | None = None


@dataclass
class _Asked:
    """A turn that a conversation waits for."""

    seat: _Seat
    number: int
    ask: Ask
    answer: Future[Completion] | None = None
    """Where the completion goes; None: to the conversation itself."""


class _Leader:
    """The seats of a batch of conversations. All methods but `ask` are called in one thread."""

    def __init__(self, begin: Begin[Any], count: int, sampler: Sampler, sampling: SamplingParams) -> None:
        self.begin = begin
        self.numbers = iter(range(count))
        """Of conversations that have not begun."""
        self.found: dict[int, Any] = {}
        self.single = sampler if isinstance(sampler, SinglePromptSampler) else None
        self.sampling = sampling
        self.seats = [_Seat() for _ in range(min(count, SEATS))]
        self.at_work: set[_Seat] = set()
        """Seats that make a call."""
        self.awaited: set[_Seat] = set()
        """Those of them for which the next wave waits: they have not missed one since the call began."""
        self.ready: list[_Asked] = []
        """What the sampler is asked for next."""
        self.results: SimpleQueue[tuple[_Seat, Any, BaseException | None]] = SimpleQueue()
        self.wave: list[_Asked] = []
        """What the sampler was asked for last."""
        self.closed = False

    def start(self) -> None:
        """Begin the first conversations. The threads do not keep a process alive whose environment never answers."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        for place, seat in enumerate(self.seats):
            arguments = (seat, self.results, device)
            seat.thread = Thread(target=_make_calls, args=arguments, name=f"conversation {place}", daemon=True)
            seat.thread.start()
            self.begin_next(seat)

    def close(self) -> None:
        """Let every thread end after the call that it makes, end the conversations, and refuse what the sampler is
        still asked for."""
        self.closed = True
        left = [seat for seat in self.seats if seat.leave is not None]
        for seat in self.seats:
            if seat.leave is not None:
                seat.calls.put(seat.leave)
            seat.calls.put(None)
            if seat.talk is not None:
                seat.talk.close()
        waiting = [*self.wave, *self.ready]
        with suppress(Empty):
            while True:
                value = self.results.get_nowait()[1]
                waiting += [value] if isinstance(value, _Asked) else []
        for one in waiting:
            if one.answer is not None:
                one.answer.cancel()
        deadline = time.monotonic() + LEAVING
        for seat in left:
            assert seat.thread is not None
            seat.thread.join(max(deadline - time.monotonic(), 0.0))

    def begin_next(self, seat: _Seat) -> None:
        """Begin another conversation, if there is one."""
        number = next(self.numbers, None)
        if number is not None:
            seat.number = number
            seat.talk = self.begin(number, partial(self.ask, seat, number))
            self.go_on(seat, None)

    def go_on(self, seat: _Seat, value: Any) -> None:
        """Give a conversation what it waits for, and take its next turn or call."""
        try:
            wanted = seat.talk.send(value)
            if isinstance(wanted, Leave):
                seat.leave = wanted.call
                wanted = next(seat.talk)
        except StopIteration as ended:
            self.found[seat.number] = ended.value
            seat.leave = None
            self.begin_next(seat)
            return
        if not isinstance(wanted, Ask):
            self.call(seat, wanted)
        elif self.single is not None:
            self.call(seat, partial(self.ask_single, seat.number, wanted))
        else:
            self.ready.append(_Asked(seat, seat.number, wanted))

    def call(self, seat: _Seat, call: Call) -> None:
        """Make a call in the seat's thread."""
        self.at_work.add(seat)
        self.awaited.add(seat)
        seat.calls.put(call)

    def ask(self, seat: _Seat, number: int, ask: Ask) -> Future[Completion]:
        """Ask the sampler for a turn of a conversation whose call is under way. Called in any thread."""
        answer: Future[Completion] = Future()
        if self.single is not None and not self.closed:
            arguments = (answer, partial(self.ask_single, number, ask), (seat, self.results))
            Thread(target=_settle, args=arguments, name="sampler request", daemon=True).start()
            return answer
        self.results.put((seat, _Asked(seat, number, ask, answer), None))
        if self.closed:
            answer.cancel()
        return answer

    def ask_single(self, number: int, ask: Ask) -> Completion:
        """Ask a sampler that takes prompts one by one."""
        assert self.single is not None
        return self.single.generate_one(ask.context, self.sampling_of([ask]), ask.seed, number)

    def sampling_of(self, asked: Sequence[Ask]) -> SamplingParams:
        """How the tokens of turns are drawn, all of which are greedy or none is."""
        sampling = replace(self.sampling, max_tokens=max(ask.room for ask in asked))
        return replace(sampling, temperature=0.0) if asked[0].greedy else sampling

    def sample(self, wave: Sequence[_Asked], sampler: Sampler) -> None:
        """Ask a sampler that takes prompts together."""
        asked = [one.ask for one in wave]
        contexts = [ask.context for ask in asked]
        completions = sampler.generate(contexts, self.sampling_of(asked), [ask.seed for ask in asked])
        for one, completion in zip(wave, completions, strict=True):
            self.deliver(one, completion)

    def deliver(self, one: _Asked, completion: Completion) -> None:
        """Give a completion to whoever has asked for it."""
        if one.answer is None:
            self.go_on(one.seat, completion)
            return
        if one.answer.set_running_or_notify_cancel():
            one.answer.set_result(completion)
        if one.seat in self.at_work:
            self.awaited.add(one.seat)

    def next_wave(self) -> list[_Asked]:
        """Wait for conversations that are ready, and return their turns by their numbers; none where all have ended.

        A wave leaves when no call is awaited. It also leaves when the calls that are under way have taken more than
        twice as long as the first quarter, and GRACE: later waves do not wait for these.
        """
        began = time.monotonic()
        enough = len(self.awaited) - len(self.awaited) // 4
        leaves: float | None = None
        while self.awaited or (self.at_work and not self.ready):
            try:
                wait = None if leaves is None else max(leaves - time.monotonic(), 0.0)
                seat, value, error = self.results.get(timeout=wait)
            except Empty:
                break
            if error is not None:
                raise error
            self.awaited.discard(seat)
            if isinstance(value, _Asked):
                self.ready.append(value)
            else:
                self.at_work.discard(seat)
                self.go_on(seat, value)
            if self.ready and leaves is None and len(self.awaited) <= enough:
                now = time.monotonic()
                leaves = now + (now - began) + GRACE
        self.wave = sorted(self.ready, key=lambda one: one.number)
        self.ready = []
        self.awaited = set()
        return self.wave


def _make_calls(seat: _Seat, results: SimpleQueue[tuple[_Seat, Any, BaseException | None]], device: int | None) -> None:
    """Make the calls of a seat, in its thread."""
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own
    while (call := seat.calls.get()) is not None:
        try:
            results.put((seat, call(), None))
        except BaseException as error:  # raised again in the thread of the leader
            results.put((seat, None, error))


def _settle(answer: Future[Any], call: Call, leader: tuple[_Seat, SimpleQueue[Any]]) -> None:
    """Make a call, and give its result to whoever waits for it. An error ends all conversations."""
    seat, results = leader
    try:
        completion = call()
    except BaseException as error:  # raised again in the thread of the leader
        results.put((seat, None, error))
        answer.cancel()
        return
    if answer.set_running_or_notify_cancel():
        answer.set_result(completion)
