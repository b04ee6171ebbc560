"""Runs on a Ray worker: starts the training process that torchrun would start, and monitors it.

A process of its own, because the run is stopped by signals, which only a main thread receives, and ends by exit codes,
which would take Ray's worker with them. Started as a module it is that process: `python -m
megaswift.launchers.ray_worker TASK OPTIONS`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from megaswift.errors import EXIT_USER_ERROR
from megaswift.launchers.finish_marks import FOLDER, unfinished_text

POLL_SECONDS = 0.3
SIGKILL_WITH_PARENT = (1, int(signal.SIGKILL))
"""prctl's PR_SET_PDEATHSIG: Ray ends its workers without a word, and the run's processes must not live on."""


def run_worker(plan: dict[str, Any]) -> None:
    """Ray Train's loop function. `plan`: task, argv, environ, folder, exchange."""
    import ray
    from ray import train

    context = train.get_context()
    exchange = plan["exchange"]
    rank = context.get_world_rank()
    # Meet: rank 0 publishes an address and a port, and the other workers wait for them.
    if rank == 0:
        ray.get(exchange.meet.remote(ray.util.get_node_ip_address(), unused_port()))
    while (address := ray.get(exchange.where.remote())) is None:
        time.sleep(POLL_SECONDS)
    environ = worker_environment(plan["environ"], address) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    if not Path(plan["folder"]).is_dir():
        raise FileNotFoundError(
            f"{plan['folder']} does not exist on {socket.gethostname()}: all nodes of a run must share its folders"
        )
    # Start training in a process of its own that Ray's worker can signal.
    marks = tempfile.TemporaryDirectory(prefix="megaswift-unfinished-")
    process = start_training_process(
        [sys.executable, "-P", "-m", __name__, plan["task"], *plan["argv"]],
        environ | {FOLDER: marks.name},
        plan["folder"],
    )
    ray.get(exchange.begin.remote(rank))
    # Pass its output and the signals on until it ends.
    reader = threading.Thread(target=lambda: [exchange.say.remote(line) for line in process.stdout or ()])
    reader.start()
    seen = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        for number in ray.get(exchange.signalled.remote(seen)):
            seen += 1
            process.send_signal(number)
    # Report how it ended. A run that exits with 0 but left its mark did not finish.
    reader.join()
    code = process.returncode
    if code == 0 and (line := unfinished_text(Path(marks.name))):
        code = EXIT_USER_ERROR
        ray.get(exchange.say.remote(f"[rank {rank}] {line}\n"))
    marks.cleanup()
    ray.get(exchange.end.remote(rank, code))
    if code and not seen:
        raise ChildProcessError(f"rank {rank} exited with code {code}")


def worker_environment(given: dict[str, str], address: tuple[str, int]) -> dict[str, str]:
    """That of this worker, with what the command says, megaswift where this process found it, and the address of rank
    0."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **given,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }


def start_training_process(words: list[str], environ: dict[str, str], folder: str) -> subprocess.Popen[str]:
    """The process. Ray blocks SIGINT in its workers; the run's process takes it."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            words,
            env=environ,
            cwd=folder,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unused_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def main(argv: list[str]) -> None:
    """The process of one rank: ends when its worker does, else is the task's own command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(*SIGKILL_WITH_PARENT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = argv
    runpy.run_module(f"megaswift.{argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
