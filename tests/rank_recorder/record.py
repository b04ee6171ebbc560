"""What a rank did, phase by phase: collectives by kind and group size, their bytes, files and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

START, STEP = "start-up", "step"


class Kind(NamedTuple):
    """Collectives that are counted together."""

    phase: str
    name: str
    """As torch.distributed names it."""
    ranks: int
    """Size of the group."""


@dataclass
class RankRecord:
    """The counts of one rank."""

    calls: Counter[Kind] = field(default_factory=Counter)
    sent: Counter[Kind] = field(default_factory=Counter)
    """Bytes of this rank's own tensors."""
    largest_received: dict[Kind, int] = field(default_factory=dict)
    """Bytes of the largest result that one call leaves on this rank."""
    files_read: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(phase, name) -> times that it was opened."""
    files_written: Counter[tuple[str, str]] = field(default_factory=Counter)
    tensor_bytes_read: Counter[str] = field(default_factory=Counter)
    """Phase -> bytes of tensors that were read from files."""
    phase: str = START

    def add(self, name: str, ranks: int, sent: int, received: int) -> None:
        """Counts one call."""
        kind = Kind(self.phase, name, ranks)
        self.calls[kind] += 1
        self.sent[kind] += sent
        self.largest_received[kind] = max(self.largest_received.get(kind, 0), received)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase for the length of a block."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def of(self, phase: str, least_ranks: int = 2) -> dict[tuple[str, int], tuple[int, int]]:
        """(kind, group size) -> (calls, bytes) of a phase, groups of at least so many ranks."""
        return {
            (kind.name, kind.ranks): (calls, self.sent[kind])
            for kind, calls in self.calls.items()
            if kind.phase == phase and kind.ranks >= least_ranks
        }
