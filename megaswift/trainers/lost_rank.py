"""Diagnosis of failed collectives: which ranks are missing or have ended, and the stacks of all ranks.

Owns OUT/stacks/rank-N.txt and the message about a lost rank. A rank that waits in vain asks the others of its machine
for their stacks by a signal, which Python's fault handler answers even while a rank is stuck in a library.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megaswift import distributed
from megaswift.errors import Problem, UserError
from megaswift.log import count_text

FOLDER = "stacks"
ASK = signal.SIGUSR2
GRACE_SECONDS = 4.0
"""Ranks that wait in the same collective give up within this time; a launcher has ended the others by then."""
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo",
    "Gloo",
    "NCCL",
    "has ended (process",
)
LATE = ("Timed out", "timed out", "timeout")

_files: dict[str, IO[str]] = {}


class LostRankError(UserError):
    """Another rank ended, or did not come to a collective."""

    title = "training was stopped"
    exit_code = 1


def dump_stacks_on_signal(root: Path) -> None:
    """From now on a signal, or a crash in a library, writes this rank's stacks below `root`. Its host and process
    id go to the store, for the other ranks."""
    if distributed.global_world_size() == 1:
        return
    rank = distributed.global_rank()
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{rank}.txt"
    old = _files.pop("stacks", None)
    file = _files["stacks"] = path.open("w", encoding="utf-8")
    if old is not None:
        old.close()
    faulthandler.register(ASK, file=file, all_threads=True)
    faulthandler.enable(file=file)
    _store().set(f"megaswift/process/{rank}", f"{socket.gethostname()} {os.getpid()}")


def is_lost_rank_error(error: RuntimeError) -> bool:
    """Whether a collective failed because of another rank."""
    text = str(error)
    return distributed.global_world_size() > 1 and (
        isinstance(error, dist.DistError) or any(word in text for word in (*LOST, *LATE))
    )


def explain_lost_rank(error: RuntimeError, root: Path, timeout_s: float) -> LostRankError:
    """The message, after the stacks of this rank and of missing ones of this machine were written below `root`."""
    rank, world = distributed.global_rank(), distributed.global_world_size()
    if file := _files.get("stacks"):
        traceback.print_exception(error, file=file)
        file.flush()
    late = any(word in str(error) for word in LATE)
    with suppress(RuntimeError):  # the store ended with its process
        _store().set(f"megaswift/gave-up/{rank}", "1")
    time.sleep(GRACE_SECONDS)
    missing = [r for r in range(world) if r != rank and not _gave_up(r)]
    ended = [r for r in missing if _ask(r) is False]
    time.sleep(0.5)  # the fault handler writes
    where = f"stacks and errors of the ranks: {root / FOLDER}"
    if ended:
        what, rule = _ranks(ended), "ended before the others"
    elif late and missing:
        what, rule = _ranks(missing), f"did not join a collective within {timeout_s:.0f} s (--ddp_timeout)"
    else:
        what, rule = f"rank {rank}", f"lost the connection to another rank: {str(error).splitlines()[0][:160]}"
    return LostRankError(
        Problem(what, f"{rule}; {where}", "--resume_from_checkpoint latest resumes from the last checkpoint")
    )


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _gave_up(rank: int) -> bool:
    """Whether a rank came to the same end; a store that is gone knows nothing."""
    with suppress(RuntimeError):
        return bool(_store().check([f"megaswift/gave-up/{rank}"]))
    return False


def _ask(rank: int) -> bool | None:
    """Asks a rank of this machine for its stacks; False when it has ended, None when it cannot be reached."""
    name = f"megaswift/process/{rank}"
    with suppress(RuntimeError):
        _store().wait([name], timedelta(seconds=1))
        host, process = _store().get(name).decode().split()
        if host == socket.gethostname():
            try:
                os.kill(int(process), ASK)
            except ProcessLookupError:
                return False
            return True
    return None


def _ranks(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"{count_text(len(numbers), 'rank')} ({listed})"
