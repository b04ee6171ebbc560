"""The runner process of the sandbox: forks one child per program, with resource limits and a timeout.

`python -m megaswift.rewards.sandbox_server KIND DESCRIPTOR WORKERS`: orders come on that socket, for so many
children at a time.

It is a process of its own so that a child inherits neither the trainer's memory nor its environment, descriptors or
threads. It holds no job either: the trainer writes a job into files in memory and passes their descriptors with an
order, which has limits only; the child alone reads them. So the memory and the frames that a program finds in its
process contain its own job and no other.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megaswift.rewards import sandbox_child

FILES = 6
"""Descriptors of an order: input, output, errors, result, job, state. They become the child's descriptors 0 to 5."""
LOOK_SECONDS = 1.0
MESSAGE = 4096
"""Most bytes of an order, of a report, and of what a child writes about its lock."""


@dataclass(frozen=True)
class ChildLimits:
    """One child: its limits, and nothing of its job."""

    number: int
    """The trainer's name for the job."""
    cpu: int
    """Seconds of CPU time, whole as the kernel counts them."""
    clock: float
    """Seconds by the clock: a machine may be busy."""
    memory: int
    """MiB."""
    output: int
    """Bytes of each of its outputs."""
    locked: bool
    """Whether the child must be locked, or ends before it runs anything."""


@dataclass
class ChildDeadline:
    """One that runs."""

    number: int
    deadline: float
    overdue: bool = False


def _judge_maths(job: Mapping[str, Any], locked: Callable[[], None]) -> int:
    math_answers = importlib.import_module("megaswift.rewards.math_answers")
    locked()
    os.write(sandbox_child.RESULT, json.dumps(math_answers.answer_verdict(job["solution"], job["completion"])).encode())
    return 0


KINDS: dict[str, Callable[[Mapping[str, Any], Callable[[], None]], int]] = {
    "program": sandbox_child.run_program,
    "maths": _judge_maths,
}


def _child(order: ChildLimits, files: list[int], kind: str, runner: int) -> int:
    """In the child, from fork to exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for wanted, file in enumerate(files):  # files are above 5: the runner's own are open
        os.dup2(file, wanted)
    os.closerange(FILES, 65536)
    os.setsid()
    job = json.loads(os.pread(sandbox_child.JOB, os.fstat(sandbox_child.JOB).st_size, 0))
    os.close(sandbox_child.JOB)
    sandbox_child.set_limits(order.cpu, order.memory, order.output)
    sandbox_child.end_with_runner(runner)

    def locked() -> None:
        if kind == "program":
            sandbox_child.drop_privileges(runner)
        if order.locked:
            sandbox_child.lock_syscalls(reading=kind == "maths")
            os.write(sandbox_child.STATE, sandbox_child.LOCKED)
        os.close(sandbox_child.STATE)

    return KINDS[kind](job, locked)


def _fork(order: ChildLimits, files: list[int], kind: str) -> int:
    """The child's process id. Its files are closed here."""
    runner = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _child(order, files, kind, runner)
        except (
            sandbox_child.SandboxSetupError
        ) as error:  # STATE is still open: a program that raises this finds it closed
            os.write(sandbox_child.STATE, sandbox_child.REFUSED + str(error).encode())
        except (OSError, ValueError, ImportError, MemoryError):  # before the lock: of a module that the program imports
            traceback.print_exc()
        finally:  # whatever a program does to Python, its process ends here
            os._exit(code)
    for file in files:
        os.close(file)
    return pid


def _reports(running: dict[int, ChildDeadline]) -> list[dict[str, Any]]:
    """What became of the children that have ended; those that are overdue are killed."""
    exited = []
    for pid, child in list(running.items()):
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            del running[pid]
            cpu = usage.ru_utime + usage.ru_stime
            exited.append({"number": child.number, "status": status, "cpu": cpu, "overdue": child.overdue})
        elif time.monotonic() > child.deadline and not child.overdue:
            child.overdue = True
            os.kill(pid, signal.SIGKILL)
    return exited


def _patience(running: Mapping[int, ChildDeadline]) -> int:
    """Milliseconds until a child is overdue, or it is time to look after the trainer."""
    deadlines = [c.deadline for c in running.values() if not c.overdue]
    left = min(deadlines) - time.monotonic() if deadlines else LOOK_SECONDS
    return int(1000 * min(max(left, 0.0), LOOK_SECONDS)) + 1


def serve_jobs(control: socket.socket, kind: str, workers: int) -> None:
    """Forks a child for each order and reports its end, until the trainer is gone; children end with this process.
    Orders that wait stay in the socket, and their files with them."""
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only signals with a handler reach the pipe
    signal.set_wakeup_fd(wake)
    running: dict[int, ChildDeadline] = {}
    trainer = os.getppid()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = dict(poll.poll(_patience(running)))
        if os.getppid() != trainer:  # its other children may still have the socket open
            return
        requested = ready.get(control.fileno(), 0)
        if requested & select.POLLHUP:
            return
        if requested:
            message, files, _, _ = socket.recv_fds(control, MESSAGE, FILES)
            order = ChildLimits(**json.loads(message))
            deadline = time.monotonic() + order.clock
            running[_fork(order, files, kind)] = ChildDeadline(order.number, deadline)
        if ended in ready:
            os.read(ended, MESSAGE)
        for report in _reports(running):
            control.send(json.dumps(report).encode())
        poll.modify(control, select.POLLIN if len(running) < workers else 0)


def main() -> None:
    """Its folder is the children's: empty and not theirs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    kind, descriptor, workers = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    while os.open(os.devnull, os.O_RDWR) < FILES:  # so that what is passed lies above the child's own descriptors
        pass
    if kind == "maths":
        importlib.import_module("megaswift.rewards.math_answers").preload_lazy_imports()
    else:
        sys.path.remove(os.environ["PYTHONPATH"])  # the standard library alone
        sandbox_child.import_all(sandbox_child.COMMON)
    gc.collect()
    gc.freeze()  # a child's collector leaves what is shared alone
    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer is gone
        serve_jobs(control, kind, int(workers))


if __name__ == "__main__":
    main()
