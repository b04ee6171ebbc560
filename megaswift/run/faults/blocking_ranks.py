"""What each rank waits for when a collective fails: published in the store of the process group, and followed from rank
to rank until the ranks are found for which the others wait."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from megaswift import distributed
from megaswift.engine.diagnostics.flight_recorder import (
    PendingCollective,
    WaitingCall,
    frame_text,
    group_ranks,
    main_thread_frame,
    newest_sequence_numbers,
    pending_collectives,
    waiting_call,
)

ASK = signal.SIGUSR2
"""On which a rank writes its stacks."""


@dataclass(frozen=True)
class RankState:
    """What a rank does at one moment."""

    step: int
    """Number of the optimizer step, 0 before the first."""
    waits: str = ""
    """The operation that it waits in, for a message; empty: it waits for no rank."""
    members: list[int] = field(default_factory=list)
    """Global ranks that take part in this operation; empty where unknown."""
    group: str = ""
    sequence: int = 0
    """The collective's number in the group, 0 where unknown."""
    counts: dict[str, int] = field(default_factory=dict)
    """Group -> collectives that this rank has started in it."""
    code: str = ""
    """The innermost calls of its main thread."""


@dataclass(frozen=True)
class Cause:
    """For whom the ranks wait."""

    ended: list[int]
    """Their processes have ended."""
    silent: list[int]
    """They did not answer."""
    elsewhere: dict[int, RankState]
    """They wait for no rank."""
    waiting: dict[int, RankState]
    """All that were asked and wait; where the other fields are empty, these wait for each other."""


@dataclass(frozen=True)
class PatientCall(WaitingCall):
    """A wait for work of others that takes as long as it progresses."""

    def text(self) -> str:
        """Describe the call for a message."""
        return self.function


def patient_call(ranks: Iterable[int] = ()) -> PatientCall | None:
    """Return the wait in which the main thread is, with all of its ranks or these; None outside of such a wait."""
    if not distributed.patient_waits:
        return None
    waited = tuple(ranks) or tuple(r for r in distributed.patient_waits[-1].ranks if r != distributed.global_rank())
    return PatientCall("the others at the end of its work, without any progress,", waited)


def own_state(step: int, failed: PendingCollective | WaitingCall | None = None) -> RankState:
    """Return this rank's state. `failed`: the operation that has just failed, where it is not pending any more."""
    frame = main_thread_frame()
    pending = pending_collectives()
    operation = failed or (pending[0] if pending else waiting_call(frame)) or patient_call()
    counts = newest_sequence_numbers()
    code = frame_text(frame)
    if operation is None:
        return RankState(step, counts=counts, code=code)
    if isinstance(operation, WaitingCall):
        return RankState(step, operation.text(), list(operation.ranks), counts=counts, code=code)
    ranks = group_ranks(operation.group)
    return RankState(step, operation.text(), ranks, operation.group, operation.sequence, counts, code)


def find_cause(
    rank: int, state_of: Callable[[int], RankState | None], has_ended: Callable[[int], bool], everyone: list[int]
) -> Cause:
    """Follows, from `rank` on, the ranks that have not joined the operation that others wait in.

    `state_of`: None for a rank that did not answer. `everyone`: taken where the members of an operation are unknown.
    """
    cause = Cause([], [], {}, {})
    seen = {rank}
    todo = [rank]
    while todo:
        one = todo.pop(0)
        state = state_of(one)
        if has_ended(one):
            cause.ended.append(one)
        elif state is None:
            cause.silent.append(one)
        elif not state.waits:
            cause.elsewhere[one] = state
        else:
            cause.waiting[one] = state
            for other in state.members or everyone:
                if other not in seen and not _has_joined(state, other, state_of):
                    seen.add(other)
                    todo.append(other)
    return cause


def _has_joined(state: RankState, other: int, state_of: Callable[[int], RankState | None]) -> bool:
    there = state_of(other)
    return bool(there and state.sequence and there.counts.get(state.group, 0) >= state.sequence)


class RankStateStore:
    """The states of all ranks in the store of the default process group; through a connection of its own, because a
    store's connection is blocked while another thread waits on it."""

    def __init__(self) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        try:
            self._store = store.clone()
        except (RuntimeError, NotImplementedError):  # a store without connections
            self._store = store
        self.rank = distributed.global_rank()
        self._published = threading.Event()
        self.host = socket.gethostname()
        self._store.set(f"megaswift/process/{self.rank}", f"{self.host} {os.getpid()}")

    def is_asked(self) -> bool:
        """Return whether some rank wants to know what the others do."""
        with suppress(RuntimeError):  # the store ended with its process
            return bool(self._store.check(["megaswift/hang"]))
        return False

    def ask(self) -> None:
        """Makes `is_asked` true on every rank."""
        with suppress(RuntimeError):
            self._store.set("megaswift/hang", str(self.rank))

    def asker_has_ended(self) -> bool:
        """Return whether the process that asked is gone; true for one of another machine, which cannot be seen."""
        host, _, process = (self._get(f"megaswift/process/{self._get('megaswift/hang')}") or "").partition(" ")
        if host != self.host or not process:
            return True
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        return False

    def publish(self, state: RankState) -> None:
        """Publish this rank's state for the others; only the first one counts."""
        if self._published.is_set():
            return
        self._published.set()
        with suppress(RuntimeError):
            self._store.set(f"megaswift/state/{self.rank}", json.dumps(asdict(state)))

    def state_of(self, rank: int) -> RankState | None:
        """Return the state that a rank has published; None without."""
        text = self._get(f"megaswift/state/{rank}")
        return None if text is None else RankState(**_fields(text))

    def publish_progress(self, value: int) -> None:
        """Publish a number that changes with this rank's progress."""
        with suppress(RuntimeError):
            self._store.set(f"megaswift/progress/{self.rank}", str(value))

    def progress_of(self, rank: int) -> str:
        """Return the number of a rank; empty where it has published none."""
        return self._get(f"megaswift/progress/{rank}") or ""

    def is_set(self, key: str) -> bool:
        """Return whether a key is in the store; true where the store has ended."""
        with suppress(RuntimeError):
            return bool(self._store.check([key]))
        return True

    def host_of(self, rank: int) -> str:
        """Return the machine of a rank; empty where unknown."""
        return (self._get(f"megaswift/process/{rank}") or "").partition(" ")[0]

    def ask_for_stacks(self, rank: int) -> bool:
        """Sends a rank of this machine the signal on which it writes its stacks; False where its process has ended."""
        host, _, process = (self._get(f"megaswift/process/{rank}") or "").partition(" ")
        if host == self.host and process:
            try:
                os.kill(int(process), ASK)
            except ProcessLookupError:
                return False
        return True

    def _get(self, name: str) -> str | None:
        with suppress(RuntimeError):
            if self._store.check([name]):
                return self._store.get(name).decode()
        return None


def _fields(text: str) -> dict[str, Any]:
    return dict(json.loads(text))
