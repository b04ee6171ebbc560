"""Failed collectives: which ranks the others wait for, in which operation and step, and the stacks of all ranks.

Owns OUT/stacks/rank-N.txt and the message about a lost rank. A rank that waits in vain asks the others for what they
do; those of its machine write their stacks on a signal too, which Python's fault handler answers even while a rank is
stuck in a library.
"""

from __future__ import annotations

import faulthandler
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megaswift import distributed
from megaswift.engine.diagnostics.flight_recorder import PendingCollective, WaitingCall, failed_call
from megaswift.errors import Problem, UserError
from megaswift.log import count_text
from megaswift.run.faults.blocking_ranks import (
    ASK,
    Cause,
    RankState,
    RankStateStore,
    find_cause,
    own_state,
)

FOLDER = "stacks"
GRACE_SECONDS = 3.0
"""Ranks answer within this time, and a launcher has ended the others by then."""
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


class LostRankError(UserError):
    """Another rank ended, or did not come to a collective."""

    title = "training was stopped"
    exit_code = 1


@dataclass
class RankDiagnosis:
    """What this rank needs when a collective fails."""

    root: Path
    """The run's output directory."""
    states: RankStateStore
    stacks: IO[str]
    step: Callable[[], int] = int
    """Number of the optimizer step that is under way, 0 outside of training."""
    oldest_pending: PendingCollective | None = None
    """The last one that the monitor saw: a backend drops an operation from its records when it raises."""
    explaining: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that explains a failure: the one that waited, or the monitor."""


_own: list[RankDiagnosis] = []


def dump_stacks_on_signal(root: Path) -> RankDiagnosis | None:
    """Write this rank's stacks below `root` on a signal or a crash in a library from now on, and answer other ranks'
    questions. None on a single rank."""
    if distributed.global_world_size() == 1:
        return None
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    file = (folder / f"rank-{distributed.global_rank()}.txt").open("w", encoding="utf-8")
    faulthandler.register(ASK, file=file, all_threads=True)
    faulthandler.enable(file=file)
    while _own:
        _own.pop().stacks.close()
    _own.append(RankDiagnosis(root, RankStateStore(), file))
    return _own[0]


def is_lost_rank_error(error: RuntimeError) -> bool:
    """Return whether a collective failed because of another rank."""
    text = str(error)
    return distributed.global_world_size() > 1 and (
        isinstance(error, dist.DistError) or any(word in text for word in (*LOST, *LATE))
    )


@contextmanager
def lost_ranks_explained(timeout_s: float) -> Iterator[None]:
    """Turns the failure of a collective, because of another rank, into an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank_error(error):
            raise
        raise explain_lost_rank(error, timeout_s) from error


def explain_lost_rank(error: RuntimeError, timeout_s: float) -> LostRankError:
    """Return the message about lost ranks, once all ranks that can have written their stacks."""
    failed = failed_call(error.__traceback__)
    if not _own:  # before training has begun
        return LostRankError(Problem(f"rank {distributed.global_rank()}", _connection_rule(error, failed)))
    own = _own[0]
    own.explaining.acquire()
    traceback.print_exception(error, file=own.stacks)
    own.stacks.flush()
    late = any(word in str(error) for word in LATE)
    return lost_rank_error(
        own, failed or own.oldest_pending, timeout_s if late else None, _connection_rule(error, failed)
    )


def lost_rank_error(
    own: RankDiagnosis, operation: PendingCollective | WaitingCall | None, timeout_s: float | None, otherwise: str
) -> LostRankError:
    """Asks all ranks what they do and names those that the others wait for.

    `operation`: the one that failed here. `timeout_s`: after which it failed; None: a connection was closed.
    `otherwise`: what to say of this rank where no other is found.
    """
    own.states.ask()
    own.states.publish(own_state(own.step(), operation))
    time.sleep(GRACE_SECONDS)
    others = [r for r in range(distributed.global_world_size()) if r != own.states.rank]
    ended = {r for r in others if not own.states.ask_for_stacks(r)}
    time.sleep(0.5)  # the fault handler writes
    state_of = cache(own.states.state_of)
    cause = find_cause(own.states.rank, state_of, ended.__contains__, others)
    where = f"stacks and errors of the ranks: {own.root / FOLDER}"
    fix = "--resume_from_checkpoint latest resumes from the last checkpoint"
    if ended:  # also one that nobody was waiting for
        problems = [Problem(_ranks(sorted(ended)), f"ended before the others{_in_step(own)}; {where}", fix)]
    elif timeout_s is None:
        problems = [Problem(f"rank {own.states.rank}", f"{otherwise}{_in_step(own)}; {where}", fix)]
    else:
        problems = _late_problems(own, cause, timeout_s, where, fix)
    error = LostRankError(problems)
    error.rank0_may_print = 0 not in (*ended, *cause.silent, *cause.elsewhere)
    return error


def _late_problems(own: RankDiagnosis, cause: Cause, timeout_s: float, where: str, fix: str) -> list[Problem]:
    """Which ranks did not come in time."""
    absent = sorted([*cause.silent, *cause.elsewhere])
    waited = _awaited(cause, absent) or next(iter(cause.waiting.values()), RankState(own.step()))
    operation = waited.waits or "a collective"
    if not absent:
        doing = "; ".join(f"rank {r} in {s.waits}, step {s.step}" for r, s in list(cause.waiting.items())[:4])
        rule = f"wait for each other in different operations for {timeout_s:.0f} s (--ddp_timeout): {doing}; {where}"
        return [Problem(_ranks(sorted(cause.waiting)), rule, fix)]
    rule = f"did not join {operation} within {timeout_s:.0f} s (--ddp_timeout){_in_step(own)}"
    doing = "; ".join(f"rank {r} runs {s.code}" for r, s in list(cause.elsewhere.items())[:4] if s.code)
    silent = [f"rank {r} on {own.states.host_of(r)} does not answer" for r in cause.silent[:4] if own.states.host_of(r)]
    details = "; ".join(filter(None, [doing, *silent, where]))
    return [Problem(_ranks(absent), f"{rule}; {details}", fix)]


def _awaited(cause: Cause, absent: Iterable[int]) -> RankState | None:
    """The state of a rank that waits for one of the absent ones."""
    lost = set(absent)
    return next((s for s in cause.waiting.values() if lost & set(s.members)), None)


def _connection_rule(error: RuntimeError, failed: WaitingCall | None) -> str:
    inside = f" in {failed.text()}" if failed is not None else ""
    return f"lost the connection to another rank{inside}: {str(error).splitlines()[0][:160]}"


def _in_step(own: RankDiagnosis) -> str:
    step = own.step()
    return f" in step {step}" if step else ""


def _ranks(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"{count_text(len(numbers), 'rank')} ({listed})"
