"""Whole training runs for tests: by torchrun, as users start them, or by ranks that have paid for their imports.

`start` and `finish` are the real command; a run by it costs each rank some eight seconds of imports. `run` gives the
same command line to the same entry point in forked ranks, with the variables that torchrun sets: for tests of what a
run does, not of how it is started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.parity.pool import RankError, shared
from tests.sources import ROOT


def start(
    inputs: Sequence[str], out: Path, *options: object, ranks: int = 2, script: str = "megaswift/sft.py"
) -> subprocess.Popen[str]:
    """A run by torchrun that has just begun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        script,
        *inputs,
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--output_dir", str(out), *map(str, options)],
        cwd=ROOT,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; nothing of it lives on."""
    try:
        return process.communicate(timeout=240)[0]
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Ends the launcher and its workers, which stand in sessions of their own, with SIGKILL."""
    if process.poll() is None:
        family = psutil.Process(process.pid)
        for member in (*family.children(recursive=True), family):
            member.kill()


def by_torchrun(inputs: Sequence[str], out: Path, *options: object, ranks: int = 2) -> str:
    """A whole run by torchrun that succeeds; what it printed."""
    process = start(inputs, out, *options, ranks=ranks)
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    return text


def run(inputs: Sequence[str], out: Path, *options: object, ranks: int = 2, task: str = "sft") -> str:
    """A whole run by forked ranks that succeeds; what they printed, rank 0 first."""
    words = [*inputs, "--output_dir", str(out), *map(str, options)]
    return shared().logged("tests.trainers.runs:work", (task, words), ranks, timeout=240.0)


def killed(inputs: Sequence[str], out: Path, *options: object, when: Callable[[], bool], ranks: int = 2) -> str:
    """A run by forked ranks, all of which SIGKILL ends once `when` says so; what is told of them."""
    with ThreadPoolExecutor(1) as thread:
        life = thread.submit(run, inputs, out, *options, ranks=ranks)
        while not when() and not life.done():
            time.sleep(0.02)
        for rank in shared().living():
            psutil.Process(rank).kill()
        error = life.exception()
    assert isinstance(error, RankError), f"nothing was killed: {error}"
    return str(error)


def work(rank: int, world: int, command: tuple[str, list[str]]) -> None:
    """The life of a worker (on the ranks)."""
    from megaswift.commands.training import main

    sys.argv = [f"megaswift/{command[0]}.py", *command[1]]
    code = main(*command)
    assert code == 0, f"exit code {code}"
