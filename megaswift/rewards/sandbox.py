"""The trainer's side of the sandbox: starts the runner, writes each job into in-memory files for one child, reads the
child's results. docs/rewards.md describes its limits.

A sandbox that does not hold runs nothing: `self_test_sandbox` tries it out, and refuses, before anything is built.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, RewardError
from megaswift.rewards import sandbox_child
from megaswift.rewards.sandbox_server import MESSAGE, ChildLimits

ROOT = str(Path(__file__).resolve().parents[2])
SLACK = 60.0
"""Seconds beyond a job's own before the runner itself counts as stuck."""
AHEAD = 2
"""Jobs that are sent before there is a worker for them."""
TAIL = 2000
"""Characters of a program's errors that are shown."""
PROBES = {
    "print(sum(map(int, input().split())))": ("ended", "4\n"),
    "try:\n open('/proc/self/environ')\nexcept PermissionError:\n print('held')": ("ended", "held\n"),
    "import ctypes\nctypes.CDLL(None).socket(2, 1, 0)": ("forbidden", ""),
    "import os\nos.fork()": ("forbidden", ""),
}
"""Programs and what must become of them, given `1 3`."""


@dataclass(frozen=True)
class JobLimits:
    """The limits of one job."""

    seconds: float = 6.0
    """Seconds of CPU time, so that a busy machine changes no reward."""
    patience: float = 3.0
    """Seconds by the clock for each of them."""
    memory: int = 512
    """MiB."""
    output: int = 1 << 20
    """Bytes of what it prints, and of its result."""

    @property
    def cpu(self) -> int:
        """Whole seconds, as the kernel counts."""
        return max(1, math.ceil(self.seconds))

    @property
    def clock(self) -> float:
        """Seconds by the clock."""
        return self.seconds * self.patience


@dataclass(frozen=True)
class JobOutcome:
    """What became of one job."""

    how: str
    """ended | failed | time | output | forbidden."""
    code: int
    """Exit code; below 0: the signal that ended it."""
    out: str
    result: str
    errors: str
    """The last of its standard error."""


def worker_count() -> int:
    """Children at a time: this rank's share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(16, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def _file(name: str, content: bytes = b"") -> int:
    """The descriptor of a file in memory, at its start."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    written = 0
    while written < len(content):
        written += os.pwrite(file, memoryview(content)[written:], written)
    return file


def _files(job: Mapping[str, Any]) -> list[int]:
    """A job as the runner's children take it: see `runner.FILES`."""
    rest = {name: value for name, value in job.items() if name != "input"}
    given = job.get("input", "").encode(errors="surrogatepass")
    return [
        _file("input", given),
        *(_file(name) for name in ("output", "errors", "result")),
        _file("job", json.dumps(rest).encode()),
        _file("state"),
    ]


def _read(file: int, most: int) -> bytes:
    return os.pread(file, min(most, os.fstat(file).st_size), 0)


def _outcome(files: Sequence[int], report: Mapping[str, Any], limits: JobLimits) -> JobOutcome:
    """What the files of a child that has ended hold, and what its end means."""
    code = os.waitstatus_to_exitcode(report["status"])
    cpu = limits.cpu
    largest = max(os.fstat(f).st_size for f in files[1:4])
    out, errors, result = (_read(file, limits.output).decode(errors="replace") for file in files[1:4])
    how = "ended" if code == 0 else "failed"
    # the kernel limits by ticks and reports other sums; else memory ran out
    deaf = -code == signal.SIGKILL and report["cpu"] > cpu / 2
    if report["overdue"] or deaf or -code == signal.SIGXCPU:
        how = "time"
    elif -code == signal.SIGSYS:
        how = "forbidden"
    elif largest >= limits.output:
        how = "output"
        out = ""
        result = ""
    return JobOutcome(how, code, out, result, errors[-TAIL:])


@dataclass
class Sandbox:
    """A runner for jobs of one kind, started when it is first needed; it ends with the trainer or by `close`."""

    kind: str
    limits: JobLimits
    locked: bool = True
    """False: limits only."""
    _process: subprocess.Popen[bytes] | None = None
    _control: socket.socket | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _errors: Any = None
    _one: threading.Lock = field(default_factory=threading.Lock)

    def _start(self) -> socket.socket:
        """The socket of a runner that lives."""
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        self.close()
        if not sys.platform.startswith("linux"):
            raise RewardError(Problem("the sandbox", f"requires Linux; this is {sys.platform}"))
        self._folder = tempfile.TemporaryDirectory(prefix="megaswift-sandbox-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bare = ["-S"] if self.kind == "program" else []
        words = ["-s", "-P", *bare, "-m", f"{__package__}.sandbox_server"]
        words += [self.kind, str(theirs.fileno()), str(worker_count())]
        environment = {
            "PYTHONPATH": ROOT,
            "PYTHONHASHSEED": "0",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self._control

    def run(self, jobs: Sequence[Mapping[str, Any]], limits: JobLimits | None = None) -> list[JobOutcome]:
        """What became of each, in their order; RewardError where the sandbox itself failed. `limits`: others than
        usual."""
        limits = limits or self.limits
        if not jobs:
            return []
        files: dict[int, list[int]] = {}
        with self._one:
            complete = False
            try:
                outcomes = self._outcomes(jobs, limits, files)
                complete = True
            except OSError as error:
                rule = f"its process ended while running {len(jobs)} jobs ({error})\n{self._said()}"
                raise RewardError(Problem("the sandbox", rule)) from None
            finally:
                for file in [f for each in files.values() for f in each]:
                    os.close(file)
                if not complete:  # children may still run, and their reports must not reach the next call
                    self.close()
        return [outcomes[number] for number in range(len(jobs))]

    def _outcomes(
        self, jobs: Sequence[Mapping[str, Any]], limits: JobLimits, files: dict[int, list[int]]
    ) -> dict[int, JobOutcome]:
        """By the number of the job. `files` of those that run, or wait for the runner while others run."""
        control = self._start()
        sent = worker_count() + AHEAD
        outcomes = dict[int, JobOutcome]()
        control.settimeout(limits.clock + SLACK)
        waiting = iter(range(len(jobs)))
        while len(outcomes) < len(jobs):
            for number in itertools.islice(waiting, sent - len(files)):
                files[number] = _files(jobs[number])
                order = ChildLimits(number, limits.cpu, limits.clock, limits.memory, limits.output, self.locked)
                socket.send_fds(control, [json.dumps(asdict(order)).encode()], files[number])
            message = control.recv(MESSAGE)
            if not message:
                raise ConnectionResetError("the sandbox process closed its socket")
            report = json.loads(message)
            ended = files[report["number"]]
            state = _read(ended[-1], MESSAGE)
            if self.locked and state.startswith(sandbox_child.REFUSED):
                what = state.removeprefix(sandbox_child.REFUSED).decode()
                raise RewardError(Problem("the sandbox", f"could not be set up; no program was run: {what}"))
            outcomes[report["number"]] = _outcome(ended, report, limits)
            for file in files.pop(report["number"]):
                os.close(file)
        return outcomes

    def _said(self) -> str:
        self._errors.seek(0)
        return "".join(
            "    " + line for line in self._errors.read().decode(errors="replace").splitlines(keepends=True)[-6:]
        )

    def close(self) -> None:
        """Ends the runner and its children."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for file in (self._control, self._errors):
            if file is not None:
                file.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._control = self._errors = self._folder = None

    def __del__(self) -> None:
        self.close()


def self_test_sandbox(sandbox: Sandbox, flag: str) -> None:
    """ConfigError unless a good program runs and attacks are held; costs a fraction of a second."""
    problem = _doubt(sandbox)
    if problem:
        raise ConfigError(
            Problem(
                flag,
                f"generated programs need a sandbox, which is not available here: {problem}",
                "use Linux on x86_64 or aarch64, in a container that allows seccomp filters; or "
                "--allow_unsafe_code true on a disposable machine",
            )
        )


def _doubt(sandbox: Sandbox) -> str:
    """What is wrong with the sandbox, or nothing."""
    if not sys.platform.startswith("linux"):
        return f"it is {sys.platform}, not Linux"
    try:
        outcomes = sandbox.run([{"source": source, "input": "1 3\n"} for source in PROBES], JobLimits(seconds=20.0))
    except RewardError as error:
        return error.problems[0].rule
    for source, outcome in zip(PROBES, outcomes, strict=True):
        how, out = PROBES[source]
        if (outcome.how, outcome.out) != (how, out):
            return (
                f"a trial program ({source.splitlines()[-1].strip()}) ended with '{outcome.how}', not '{how}': "
                f"{outcome.errors[-200:]}"
            )
    return ""
