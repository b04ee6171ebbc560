"""torchrun's agent as megaswift starts it: `python -m megaswift.launchers.torchrun_agent TORCHRUN_OPTIONS`.

The same agent and the same workers. What differs is how it ends: one line in place of torchrun's traceback, and the
exit code of the process that failed first in place of 1. The agent and its workers end with the process that started
them. torchrun's own log is off unless LOGLEVEL is set.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.errors import EXPLAINED
from megaswift.launchers.parent_death import PARENT, end_with_parent
from megaswift.launchers.wait_for_nodes import MissingNodesError, gather_nodes


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
    """The cause: the earliest; of one second, a process that a signal other than the agent's SIGTERM ended."""
    return min(failures, key=lambda f: (f.code == -signal.SIGTERM, f.when, f.code >= 0, f.rank))


def failure_text(failure: WorkerFailure) -> str:
    """The line about a run's end; empty where the process has said itself why it ended."""
    if failure.explained or failure.code in EXPLAINED:
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


def failures_from_error(error: Any) -> list[WorkerFailure]:
    """Of torchrun's ChildFailedError."""
    return [
        WorkerFailure(rank, f.pid, f.exitcode, f.timestamp, explained=Path(f.error_file).is_file())
        for rank, f in error.failures.items()
    ]


def quiet_torchrun(environ: Mapping[str, str]) -> None:
    """Turns torchrun's log off: its lines repeat the final error message."""
    if "LOGLEVEL" not in environ:
        logging.disable(logging.CRITICAL)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun to the end; the exit code."""
    end_with_parent(os.environ)
    os.environ[PARENT] = str(os.getpid())
    quiet_torchrun(os.environ)
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    try:
        nodes = gather_nodes(os.environ)  # kept: it is the store that torchrun uses
        run.main(list(sys.argv[1:] if argv is None else argv))
    except ChildFailedError as error:
        failure = first_failure(failures_from_error(error))
        if line := failure_text(failure):
            print(line, file=sys.stderr, flush=True)
        return exit_code(failure)
    except MissingNodesError as error:
        print(error.message(), file=sys.stderr, flush=True)
        return error.exit_code
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before the workers were started
        return 128 + signal.SIGINT
    del nodes
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
