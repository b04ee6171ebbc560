"""The process that runs judged programs: one forked child for each, under limits and a clock. `python -m ...runner`,
requests on its stdin.

It is a process of its own so that a child inherits neither the trainer's memory nor its environment, descriptors or
threads. A request is one line of JSON, so is its answer. Outputs go to files in memory, so that nobody waits for a pipe
and the limit on file sizes bounds them. Expected answers never come here: what a program could read, it could print.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.trainers.rewards import jail

STREAMS = 4
"""Input, output, errors, result."""
TAIL = 2000
"""Bytes of a program's errors that are told."""


@dataclass(frozen=True)
class Request:
    """Jobs of one kind and their limits."""

    kind: str
    jobs: list[dict[str, Any]]
    seconds: float
    """Of CPU time."""
    patience: float
    """Seconds by the clock for each of them: a machine may be busy."""
    memory: int
    """MiB of a child."""
    output: int
    """Bytes of each of its outputs."""
    workers: int
    locked: bool
    """Whether a child must be locked, or ends before it runs anything."""

    @property
    def cpu(self) -> int:
        """Whole seconds, as the kernel counts."""
        return max(1, math.ceil(self.seconds))


@dataclass
class Child:
    """One that runs."""

    job: int
    files: list[int]
    deadline: float
    overdue: bool = False


def _judge_maths(job: Mapping[str, Any], locked: Callable[[], None]) -> int:
    maths = importlib.import_module("megaswift.trainers.rewards.maths")
    locked()
    os.write(jail.RESULT, json.dumps(maths.verdict(job["solution"], job["completion"])).encode())
    return 0


KINDS: dict[str, Callable[[Mapping[str, Any], Callable[[], None]], int]] = {
    "program": jail.run_program,
    "maths": _judge_maths,
}


def _child(request: Request, job: Mapping[str, Any], files: list[int], runner: int) -> int:
    """In the child, from fork to exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for wanted, file in enumerate(files):  # files are above 3: the runner's own four are open
        os.dup2(file, wanted)
    os.closerange(STREAMS, 65536)
    os.setsid()
    jail.limit(request.cpu, request.memory, request.output)
    jail.bind(runner)

    def locked() -> None:
        if request.kind == "program":
            jail.drop(runner)
        if request.locked:
            jail.lock(reading=request.kind == "maths")

    return KINDS[request.kind](job, locked)


def _start(request: Request, number: int) -> tuple[int, Child]:
    job, runner = request.jobs[number], os.getpid()
    files = [os.memfd_create(f"stream{i}", os.MFD_CLOEXEC) for i in range(STREAMS)]
    os.write(files[0], job.get("input", "").encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        code = jail.UNLOCKED
        try:
            code = _child(request, job, files, runner)
        except jail.NotLocked as error:
            os.write(2, f"{error}".encode())
        finally:  # whatever a program does to Python, its process ends here
            os._exit(code)
    return pid, Child(number, files, time.monotonic() + request.seconds * request.patience)


def _read(file: int, most: int) -> str:
    data = os.pread(file, most, 0)
    os.close(file)
    return data.decode(errors="replace")


def _ended(child: Child, status: int, used: float, request: Request) -> dict[str, Any]:
    """What became of it, and what it said; `used`: seconds of CPU time."""
    os.close(child.files[0])
    sizes = [os.fstat(f).st_size for f in child.files[1:]]
    out, errors, result = (_read(file, request.output) for file in child.files[1:])
    code = os.waitstatus_to_exitcode(status)
    how = "unlocked" if code == jail.UNLOCKED else "ended" if code == 0 else "failed"
    # the kernel limits by ticks and reports other sums; else memory ran out
    deaf = -code == signal.SIGKILL and used > request.cpu / 2
    if child.overdue or deaf or -code == signal.SIGXCPU:
        how = "time"
    elif -code == signal.SIGSYS:
        how = "forbidden"
    elif max(sizes) >= request.output:
        how, out, result = "output", "", ""
    errors = errors[-TAIL:]
    return {"how": how, "code": code, "out": out, "result": result, "errors": errors}


def execute(request: Request, parent: int) -> list[dict[str, Any]]:
    """All jobs' outcomes in their order, `workers` at a time."""
    outcomes: list[dict[str, Any]] = [{}] * len(request.jobs)
    waiting, running = list(range(len(request.jobs)))[::-1], dict[int, Child]()
    while waiting or running:
        while waiting and len(running) < request.workers:
            pid, child = _start(request, waiting.pop())
            running[pid] = child
        soonest = min(c.deadline for c in running.values()) - time.monotonic()
        signal.sigtimedwait({signal.SIGCHLD}, min(max(soonest, 0.001), 0.5))
        if os.getppid() != parent:  # the trainer is gone; children end with this process
            os._exit(1)
        for pid, child in list(running.items()):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                outcomes[running.pop(pid).job] = _ended(child, status, usage.ru_utime + usage.ru_stime, request)
            elif time.monotonic() > child.deadline and not child.overdue:
                child.overdue = True
                os.kill(pid, signal.SIGKILL)
    return outcomes


def main() -> None:
    """Answers requests until its input ends. Its folder is the children's: empty and not theirs."""
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    os.dup2(os.open(os.devnull, os.O_RDWR), 3)
    if sys.argv[1:] == ["maths"]:
        importlib.import_module("megaswift.trainers.rewards.maths").warm()
    else:
        sys.path.remove(os.environ["PYTHONPATH"])  # the standard library alone
        jail.import_all(jail.COMMON)
    requests = sys.stdin.buffer
    while line := requests.readline():
        answer = execute(Request(**json.loads(line)), parent)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
