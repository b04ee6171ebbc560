"""Agreement between the ranks of a run: a flag, a maximum, a sum, the outcome of work that only rank 0 does.

Works on the default process group, and is the identity without one. Owns no groups: trainers know the Engine protocol
only.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megaswift import errors
from megaswift.errors import CheckpointError, Problem, UserError, storage_error

T = TypeVar("T")
_WAITS = itertools.count()
"""Every rank comes to the same waits in the same order."""


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Global rank, 0 without a process group."""
    return dist.get_rank() if _several() else 0


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if _several() else 1


def _reduce(values: Sequence[float], operation: Any) -> list[float]:
    if not _several():
        return [float(v) for v in values]
    # on the CPU: the group has gloo there, with and without GPUs
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def largest(values: Sequence[float]) -> list[float]:
    """Of each value, the largest over the ranks."""
    return _reduce(values, dist.ReduceOp.MAX)


def total(values: Sequence[float]) -> list[float]:
    """Of each value, the sum over the ranks (float64: exact for whole numbers up to 2^53)."""
    return _reduce(values, dist.ReduceOp.SUM)


def smallest_in(values: torch.Tensor) -> None:
    """In place, of each number of a tensor in host memory the smallest over the ranks."""
    if _several():
        dist.all_reduce(values, op=dist.ReduceOp.MIN)


def barrier() -> None:
    """Waits until every rank is here."""
    if _several():
        dist.barrier()


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _wait_for_main(hours: float) -> None:
    """Returns on every rank once rank 0 is here, by the store that started the group: no collective is under way
    meanwhile."""
    store, name = dist.distributed_c10d._get_default_store(), f"megaswift/{next(_WAITS)}"
    if rank() == 0:
        store.set(name, "done")
    else:
        store.wait([name], datetime.timedelta(hours=hours))


def on_main(work: Callable[[], T], hours: float = 0.0) -> T:
    """Does `work` on rank 0 and hands its result to all; a user's mistake found there is raised on every rank.

    `hours`: for work that may take longer than a collective (--ddp_timeout). The others then wait outside of one, at
    most so long.
    """
    outcome: tuple[str, Any] = ("failed", None)
    try:
        if rank() == 0:
            outcome = ("done", work())
    except UserError as error:
        if not _several():
            raise
        outcome = (type(error).__name__, error.problems)
    except OSError as error:
        found = storage_error(error) or CheckpointError(
            Problem(str(error.filename or "writing the output"), error.strerror or str(error), "another --output_dir")
        )
        outcome = (type(found).__name__, found.problems)
    finally:
        if _several():
            if hours:
                _wait_for_main(hours)
            box = [outcome]
            dist.broadcast_object_list(box, src=0)
            outcome = box[0]
    kind, value = outcome
    if kind == "done":
        return value
    if kind == "failed":
        raise RuntimeError("rank 0 failed; its message says why")
    raise getattr(errors, kind, UserError)(value)


def together(work: Callable[[], T]) -> list[T]:
    """Every rank's result of its own work, in rank order, on every rank; a user's mistake on one of them is raised on
    all."""
    mistake: UserError | None = None
    found: list[T] = []
    try:
        found.append(work())
    except UserError as error:
        mistake = error
    except OSError as error:
        mistake = storage_error(error)
        if mistake is None:
            raise
    told = gather(None if mistake is None else (type(mistake).__name__, mistake.problems))
    for kind, problems in filter(None, told):
        raise mistake or getattr(errors, kind, UserError)(problems)
    return [value for share in gather(found) for value in share]


def spread(rows: Sequence[Any], work: Callable[[Sequence[Any]], list[T]]) -> list[T]:
    """`work` on consecutive shares of `rows`, one a rank; all results, in order, on every rank. A user's mistake is
    raised on all."""
    mine = slice(len(rows) * rank() // world_size(), len(rows) * (rank() + 1) // world_size())
    return [one for share in together(lambda: work(rows[mine])) for one in share]
