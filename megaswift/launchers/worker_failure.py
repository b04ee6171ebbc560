"""Failed processes of a run: which of them is the cause, what the user is shown, the run's exit code."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.errors import NOT_RESTARTED


@dataclass(frozen=True)
class WorkerFailure:
    """A process that ended with an exit code other than 0."""

    rank: int
    process: int
    code: int
    """Negative: the signal that ended it."""
    when: int
    """Seconds, as torchrun saw it."""
    explained: bool = False
    """Whether the process has printed a message of its own."""


def first_failure(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The cause: the earliest; of one second, a process that a signal other than the agent's SIGTERM ended, then one
    with an exit code of `NOT_RESTARTED`: the others may have failed because they lost it."""
    return min(
        failures, key=lambda f: (f.code == -signal.SIGTERM, f.when, f.code >= 0, f.code not in NOT_RESTARTED, f.rank)
    )


def failure_text(failure: WorkerFailure) -> str:
    """The line about a run's end; empty where the process has said itself why it ended."""
    if failure.explained or failure.code in NOT_RESTARTED:
        return ""
    who = f"megaswift: rank {failure.rank} (process {failure.process} on {socket.gethostname()})"
    if failure.code >= 0:
        return f"{who} exited with code {failure.code}; its error message is above"
    name = signal.Signals(-failure.code).name
    why = ", often because the system ran out of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"{who} was killed by {name}{why}"


def exit_code(failure: WorkerFailure) -> int:
    """As a shell has it: 128 + n for signal n."""
    return failure.code if failure.code >= 0 else 128 - failure.code


def worker_failures(failures: Mapping[int, Any]) -> list[WorkerFailure]:
    """Converts torchrun's `ProcessFailure`s by global rank."""
    return [
        WorkerFailure(rank, f.pid, f.exitcode, f.timestamp, explained=Path(f.error_file).is_file())
        for rank, f in failures.items()
    ]
