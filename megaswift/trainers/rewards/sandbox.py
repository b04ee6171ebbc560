"""The trainer's side of the sandbox: starts the runner, hands it jobs, takes what became of them. docs/rewards.md says
what holds.

A sandbox that does not hold runs nothing: `check` tries it out, and refuses, before anything is built.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, RewardError

ROOT = str(Path(__file__).resolve().parents[3])
SLACK = 60.0
"""Seconds beyond all jobs' own before the runner itself counts as stuck."""
PROBES = {
    "print(sum(map(int, input().split())))": ("ended", "4\n"),
    "try:\n open('/proc/self/environ')\nexcept PermissionError:\n print('held')": ("ended", "held\n"),
    "import ctypes\nctypes.CDLL(None).socket(2, 1, 0)": ("forbidden", ""),
    "import os\nos.fork()": ("forbidden", ""),
}
"""Programs and what must become of them, given `1 3`."""


@dataclass(frozen=True)
class Limits:
    """Of one job."""

    seconds: float = 6.0
    """Of CPU time, so that a busy machine changes no reward."""
    patience: float = 3.0
    """Seconds by the clock for each of them."""
    memory: int = 512
    """MiB."""
    output: int = 1 << 20
    """Bytes of what it prints, and of its result."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job."""

    how: str
    """ended | failed | time | output | forbidden | unlocked."""
    code: int
    """Exit code; below 0: the signal that ended it."""
    out: str
    result: str
    errors: str
    """The last of its standard error."""


def workers() -> int:
    """Children at a time: this rank's share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(16, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


@dataclass
class Sandbox:
    """A runner for jobs of one kind, started when it is first needed; it ends with the trainer or by `close`."""

    kind: str
    limits: Limits
    locked: bool = True
    """False: limits only."""
    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _errors: Any = None
    _one: threading.Lock = field(default_factory=threading.Lock)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="megaswift-sandbox-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        bare = ["-S"] if self.kind == "program" else []
        command = [sys.executable, "-s", "-P", *bare, "-m", f"{__package__}.runner", self.kind]
        environment = {
            "PYTHONPATH": ROOT,
            "PYTHONHASHSEED": "0",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        return self._process

    def run(self, jobs: Sequence[Mapping[str, Any]], limits: Limits | None = None) -> list[Outcome]:
        """What became of each, in their order; RewardError where the sandbox itself failed. `limits`: others than
        usual."""
        limits = limits or self.limits
        if not jobs:
            return []
        with self._one:
            process, at_a_time = self._start(), workers()
            assert process.stdin is not None and process.stdout is not None
            request = {
                "kind": self.kind,
                "jobs": list(jobs),
                "workers": at_a_time,
                "locked": self.locked,
                **asdict(limits),
            }
            clock = threading.Timer(
                math.ceil(len(jobs) / at_a_time) * (limits.seconds * limits.patience + 1) + SLACK, process.kill
            )
            clock.start()
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            finally:
                clock.cancel()
            if not answer.endswith(b"\n"):
                raise RewardError(
                    Problem("the sandbox", f"its runner ended in the middle of {len(jobs)} jobs\n{self._said()}")
                )
        found = [Outcome(**one) for one in json.loads(answer)]
        unlocked = [o for o in found if o.how == "unlocked"]
        if unlocked:
            raise RewardError(Problem("the sandbox", f"could not be locked, nothing was run: {unlocked[0].errors}"))
        return found

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
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a request that was never read
                    pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None

    def __del__(self) -> None:
        self.close()


def check(sandbox: Sandbox, flag: str) -> None:
    """ConfigError unless a good program runs and attacks are held; costs a fraction of a second."""
    problem = _doubt(sandbox)
    if problem:
        raise ConfigError(
            Problem(
                flag,
                f"programs of the model run in a sandbox, and this system offers none: {problem}",
                "Linux on x86_64 or aarch64, in a container that allows seccomp filters; or "
                "--allow_unsafe_code true, on a machine that holds nothing of value",
            )
        )


def _doubt(sandbox: Sandbox) -> str:
    """What is wrong with the sandbox, or nothing."""
    if not sys.platform.startswith("linux"):
        return f"it is {sys.platform}, not Linux"
    try:
        outcomes = sandbox.run([{"source": source, "input": "1 3\n"} for source in PROBES], Limits(seconds=20.0))
    except RewardError as error:
        return error.problems[0].rule
    for source, outcome in zip(PROBES, outcomes, strict=True):
        how, out = PROBES[source]
        if (outcome.how, outcome.out) != (how, out):
            return (
                f"a trial program ({source.splitlines()[-1].strip()}) came to '{outcome.how}', not '{how}': "
                f"{outcome.errors[-200:]}"
            )
    return ""
