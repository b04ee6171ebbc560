"""Starts torchrun on this machine, one of several machines or the only one, and waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megaswift.config.launch import LaunchConfig

DEFAULT_PORT = 29500
PATIENCE_SECONDS = 1800
"""torchrun kills workers so long after a signal, 30 s unless said: less than saving a large model takes."""


def wants_processes(launch: LaunchConfig) -> bool:
    """Whether a number of processes or machines was said; if not, the run is this very process."""
    return launch.nproc_per_node is not None or launch.nnodes is not None or launch.launcher == "ray"


def world_size(launch: LaunchConfig) -> int:
    """Processes of the whole run."""
    return launch.num_workers or (launch.nproc_per_node or 1) * (launch.nnodes or 1)


def command(launch: LaunchConfig, script: Path, argv: Sequence[str]) -> list[str]:
    """torchrun's command line for this machine."""
    nodes = launch.nnodes or 1
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(launch.nproc_per_node or 1)]
    address, port = (
        (str(launch.master_addr), launch.master_port or DEFAULT_PORT)
        if nodes > 1
        else ("127.0.0.1", launch.master_port)
    )
    if port is None:
        words += ["--standalone", "--local-addr", address]  # a free port, so that two runs do not meet
    else:
        words += [
            "--nnodes",
            str(nodes),
            "--node-rank",
            str(launch.node_rank or 0 if nodes > 1 else 0),
            "--master-addr",
            address,
            "--master-port",
            str(port),
        ]
    return [*words, str(script), *argv]


def environment(launch: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of torchrun: threads shared out over the processes, time to save, where the user has not said
    otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ours = {
        "OMP_NUM_THREADS": max(1, cores // (launch.nproc_per_node or 1)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": PATIENCE_SECONDS,
    }
    return {**{name: str(value) for name, value in ours.items()}, **environ}


def start(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the command to its end, handing SIGTERM on; its exit code, 128 + n when signal n ended it (torchrun then
    says 1)."""
    process = subprocess.Popen(list(words), env=dict(environ))
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:  # which the terminal sends to torchrun as well
            process.send_signal(number)

    before = {n: signal.signal(n, hand_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code:
        return 128 + received[0]
    return code if code >= 0 else 128 - code
