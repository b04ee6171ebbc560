"""A Ray actor that exchanges output, exit codes and signals between the workers of a run and the command that started
it.

Ray's own forwarding of output marks, folds and sometimes loses lines; through here they come as torchrun shows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerEventsSinceLastPoll:
    """What has happened since the last look."""

    lines: list[str]
    started: int
    """Processes that run or have run."""
    failed: dict[int, int]
    """Exit codes other than 0, by rank, the first that failed first."""


class RunMessageActor:
    """Lines and exit codes go to the command; the address of rank 0 goes to all ranks, a signal from the command
    too."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: dict[int, int] = {}
        self.ranks: set[int] = set()
        self.address: tuple[str, int] | None = None
        self.signals: list[int] = []

    def meet(self, host: str, port: int) -> None:
        """Rank 0: where the others find it."""
        self.address = host, port

    def where(self) -> tuple[str, int] | None:
        """What rank 0 said, None before."""
        return self.address

    def begin(self, rank: int) -> None:
        """A process runs."""
        self.ranks.add(rank)

    def say(self, line: str) -> None:
        """A line of a process's output."""
        self.lines.append(line)

    def end(self, rank: int, code: int) -> None:
        """A process has ended."""
        if code:
            self.failed[rank] = code

    def signal(self, number: int) -> None:
        """The command received this signal."""
        self.signals.append(number)

    def signalled(self, seen: int) -> list[int]:
        """Signals after the first `seen`."""
        return self.signals[seen:]

    def news(self) -> WorkerEventsSinceLastPoll:
        """For the command; each line once."""
        lines = self.lines
        self.lines = []
        return WorkerEventsSinceLastPoll(lines, len(self.ranks), dict(self.failed))
