"""Progress of ranks whose work others wait for outside of collectives, as in the export: a rank that stops there is
found after --ddp_timeout, however long its work may take.

Every rank publishes a number in the store that changes when it has computed, read or written something. A rank that
waits for one that progresses progresses too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from megaswift import distributed
from megaswift.distributed import PatientWait

LONGEST_PERIOD_S = 5.0
"""Between two looks."""
LEAST_CPU_S = 0.05
"""Seconds of computing, more than idle threads take."""
WATCHING = 2
"""The number of ranks, the lowest of those at a barrier, that watch the others."""
TASKS = Path("/proc/self/task")


class ProgressStore(Protocol):
    """Where ranks publish their progress."""

    rank: int

    def publish_progress(self, value: int) -> None:
        """Publish this rank's progress."""

    def progress_of(self, rank: int) -> str:
        """Return another rank's progress; empty where it has published none."""

    def is_set(self, key: str) -> bool:
        """Return whether a key is in the store."""


def work_done() -> tuple[float, int]:
    """Returns the processor seconds of this process's Python threads, and the bytes that they wrote or that came from a
    disk. Daemon threads do not count, nor threads of libraries: the store's server answers other ranks while this one
    is stuck."""
    seconds = 0.0
    moved = 0
    for thread in threading.enumerate():
        folder = TASKS / str(thread.native_id)
        if thread.daemon:
            continue
        with suppress(OSError, ValueError, IndexError):  # it has just ended, or the system has no such files
            seconds += int((folder / "schedstat").read_text().split()[0]) / 1e9
            counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
            moved += sum(int(counts.get(name, 0)) for name in ("wchar", "read_bytes"))
    return seconds, moved


@dataclass
class ProgressWatch:
    """What the monitor's thread does for ranks that wait. `look` is called often."""

    states: ProgressStore
    timeout_s: float
    work: Callable[[], tuple[float, int]] = work_done
    _looked: float = float("-inf")
    _seconds: float = float("-inf")
    _bytes: int = -1
    _count: int = 0
    _wait: PatientWait | None = None
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Rank -> the last number of a rank that is waited for, and when it came."""

    def look(self, now: float) -> list[int]:
        """Publishes this rank's progress; returns ranks that this one waits for and that have made none for
        `timeout_s` seconds."""
        if now - self._looked < min(LONGEST_PERIOD_S, self.timeout_s / 4):
            return []
        self._looked = now
        seconds, moved_bytes = self.work()
        moved = abs(seconds - self._seconds) >= LEAST_CPU_S or moved_bytes != self._bytes
        if moved:
            self._seconds = seconds
            self._bytes = moved_bytes
        absent = self._awaited()
        for rank in absent:
            value = self.states.progress_of(rank)
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now)
                moved = True
        if moved:
            self._count += 1
            self.states.publish_progress(self._count)
        return [rank for rank in absent if now - self._seen[rank][1] > self.timeout_s]

    def _awaited(self) -> list[int]:
        wait = distributed.patient_waits[-1] if distributed.patient_waits else None
        if wait is not self._wait:
            self._wait = wait
            self._seen = {}
        if wait is None or (wait.arrived and self._others_watch(wait)):
            return []
        others = [rank for rank in wait.ranks if rank != self.states.rank]
        return [r for r in others if not (wait.arrived and self.states.is_set(f"{wait.arrived}{r}"))]

    def _others_watch(self, wait: PatientWait) -> bool:
        """Whether enough lower ranks have arrived. Asks for few keys: the first ranks have usually arrived."""
        lower = (r for r in wait.ranks if r < self.states.rank and self.states.is_set(f"{wait.arrived}{r}"))
        return len([*islice(lower, WATCHING)]) == WATCHING
