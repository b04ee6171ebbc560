"""Rank processes for the parity tests: imports are paid once, each job gets fresh processes, and nothing hangs.

A server process imports torch, Megatron-Core and the engine, and then forks `n` ranks a job (some 50 ms). Fresh
processes leave no process group, RNG or module state from one layout to the next. A rank that fails or hangs is
reported with its traceback (a hanging one by faulthandler), the others are ended, and the pool goes on.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "safetensors.torch",
    "megaswift.engine.megatron.engine",
    "tests.parity.measure",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
    "megaswift.commands.training",
    "megaswift.run.training",
    "megaswift.run.course",
    "megaswift.run.report.loss_png",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "tensorboard",
    "pyarrow",
    "pytest",
    *(f"megaswift.families.{module.name}" for module in pkgutil.iter_modules([str(ROOT / "megaswift" / "families")])),
)
"""torch's first optimizer imports torch._dynamo: 4 s of processor time that every rank would spend by itself."""
GRACE, BUSY = 5.0, 0.05
"""After the first failure the other ranks may end, or fail by themselves, until none of them has used BUSY seconds of
processor time in GRACE seconds: on a loaded machine they need longer, and ranks that hang use none."""
STACK_SECONDS = 10.0
"""A rank that does not write its stack within this time is ended without it."""


@dataclass(frozen=True)
class Job:
    """`target` ("module:function") is called as function(rank, world, payload) in `ranks` processes.

    Payload and results go through files of `folder`: a connection would share tensors by file descriptor, with who has
    long ended.
    """

    target: str
    ranks: int
    timeout: float
    folder: str


class RankError(Exception):
    """A job whose ranks failed or hung; the message holds their tracebacks."""


class Pool:
    """The user's side: starts the server once, runs jobs in it."""

    def __init__(self, preload: Sequence[str] = PRELOAD, variables: Mapping[str, str] | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        address = str(Path(self._scratch.name) / "server")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **(variables or {}),
        }
        with Listener(address, "AF_UNIX") as listener:
            command = [sys.executable, "-m", "tests.parity.pool", address, *preload]
            self._server = subprocess.Popen(command, cwd=ROOT, env=environment)
            self._connection = listener.accept()
        self._jobs = 0

    def run(self, target: str, payload: Any, ranks: int, timeout: float = 600.0) -> list[Any]:
        """The functions' results in order of rank; RankError when one failed or `timeout` seconds passed."""
        import torch

        folder = self._do(target, payload, ranks, timeout)
        return [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(ranks)]

    def logged(self, target: str, payload: Any, ranks: int, timeout: float = 600.0) -> str:
        """What the ranks printed, in order of rank."""
        folder = self._do(target, payload, ranks, timeout)
        return "".join((folder / f"rank-{r}.log").read_text(errors="replace") for r in range(ranks))

    def _do(self, target: str, payload: Any, ranks: int, timeout: float) -> Path:
        """The job's folder, with a log and a result of each rank."""
        import torch

        folder = Path(self._scratch.name) / f"job-{self._jobs}"
        folder.mkdir()
        self._jobs += 1
        torch.save(payload, folder / "payload.pt")
        self._connection.send(Job(target, ranks, timeout, str(folder)))
        failures = self._connection.recv()
        if failures:
            raise RankError(_describe(target, failures))
        return folder

    def living(self) -> list[int]:
        """The present job's ranks, by their process numbers."""
        return [child.pid for child in psutil.Process(self._server.pid).children()]

    def close(self) -> None:
        """Ends the server, by a message: a process that a test forked may hold the connection open."""
        with suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._server.wait(timeout=30)
        self._scratch.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def te_pool(release: str) -> Pool:
    """A pool whose ranks have a release of Transformer Engine on the test device."""
    return Pool(("tests.te.preload", *PRELOAD), {"MEGASWIFT_TE_RELEASE": release})


def shared(release: str = "") -> Pool:
    """The pool of this test session, without or with a release of Transformer Engine; `close_shared` ends it."""
    if release not in _started:
        _started[release] = te_pool(release) if release else Pool()
    return _started[release]


_started: dict[str, Pool] = {}


def close_shared() -> None:
    """Ends the pools of this session."""
    while _started:
        _started.popitem()[1].close()


def _describe(target: str, failures: dict[int, str]) -> str:
    """One block a distinct text, with the ranks that gave it; genuine errors before hangs."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items(), key=lambda item: item[1].startswith("ended")):
        by_text.setdefault(text, []).append(rank)
    blocks = [f"--- rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in by_text.items()]
    return f"{target} failed\n" + "\n".join(blocks)


def _free_port() -> int:
    """One below those that the system hands out by itself: another process' connection cannot take it before the ranks
    do."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _rank(job: Job, rank: int, port: int) -> None:
    """The life of a rank; never returns."""
    code = 1
    folder = Path(job.folder)
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        import torch

        module, _, function = job.target.partition(":")
        payload = torch.load(folder / "payload.pt", weights_only=False)
        result = getattr(importlib.import_module(module), function)(rank, job.ranks, payload)
        torch.save(result, folder / f"rank-{rank}.pt")
        code = 0
    except BaseException:  # noqa: BLE001 - a forked rank must not unwind into the server
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(job: Job) -> dict[int, str]:
    """Forks the ranks, waits; what went wrong, by rank."""
    port = _free_port()
    alive: dict[int, int] = {}
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port)
        alive[pid] = rank
    failed: dict[int, str] = {}
    end = deadline = time.monotonic() + job.timeout
    used = 0.0
    while alive and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
            if failed and (now := _processor_seconds(alive)) > used + BUSY:
                used = now
                deadline = min(end, time.monotonic() + GRACE)
            continue
        rank = alive.pop(pid)
        if status != 0:
            failed[rank] = _error(Path(job.folder), rank, status)
            deadline = min(end, time.monotonic() + GRACE)
            used = _processor_seconds(alive)
    for pid in alive:
        os.kill(pid, signal.SIGUSR1)
    shown_by = time.monotonic() + STACK_SECONDS
    while any(not _shows_stack(Path(job.folder), rank) for rank in alive.values()) and time.monotonic() < shown_by:
        time.sleep(0.02)
    for pid, rank in alive.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        why = "ended with the others" if failed else f"ended after {job.timeout:.0f} s"
        failed[rank] = f"{why}, it was at\n{_tail(Path(job.folder) / f'rank-{rank}.log', 25)}"
    return failed


def _processor_seconds(processes: Iterable[int]) -> float:
    """What these processes have used so far; of one that has just ended nothing."""
    total = 0.0
    for pid in processes:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _shows_stack(folder: Path, rank: int) -> bool:
    """Whether a rank's log ends with the last line that faulthandler writes."""
    log = folder / f"rank-{rank}.log"
    return log.exists() and log.read_text(errors="replace").rstrip().endswith((" in _run_module_as_main", "  ..."))


def _error(folder: Path, rank: int, status: int) -> str:
    error = folder / f"rank-{rank}.error"
    if error.exists():
        return error.read_text()
    return f"exit status {os.waitstatus_to_exitcode(status)}\n{_tail(folder / f'rank-{rank}.log', 60)}"


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def _serve(address: str, preload: Sequence[str]) -> None:
    connection: Connection = Client(address, "AF_UNIX")
    gc.disable()
    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"pool: {name} cannot be imported: {error}", file=sys.stderr)
    gc.freeze()  # a rank's collector would visit, and so copy, every page of what was imported
    gc.enable()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            return
        connection.send(_run(job))


if __name__ == "__main__":
    from tests.parity import pool  # jobs are pickled under this name, not as __main__'s

    pool._serve(sys.argv[1], sys.argv[2:])
