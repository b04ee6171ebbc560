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


def global_rank() -> int:
    """Global rank, 0 without a process group."""
    return dist.get_rank() if _several() else 0


def global_world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if _several() else 1


def _reduce(values: Sequence[float], operation: Any) -> list[float]:
    if not _several():
        return [float(v) for v in values]
    # on the CPU: the group has gloo there, with and without GPUs
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def all_max(values: Sequence[float]) -> list[float]:
    """Of each value, the largest over the ranks."""
    return _reduce(values, dist.ReduceOp.MAX)


def all_sum(values: Sequence[float]) -> list[float]:
    """Of each value, the sum over the ranks (float64: exact for whole numbers up to 2^53)."""
    return _reduce(values, dist.ReduceOp.SUM)


def all_min_(values: torch.Tensor) -> None:
    """In place, of each number of a tensor in host memory the smallest over the ranks."""
    if _several():
        dist.all_reduce(values, op=dist.ReduceOp.MIN)


def barrier() -> None:
    """Waits until every rank is here."""
    if _several():
        dist.barrier()


def all_gather_objects(value: T) -> list[T]:
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
    if global_rank() == 0:
        store.set(name, "done")
    else:
        store.wait([name], datetime.timedelta(hours=hours))


def run_on_rank0(work: Callable[[], T], hours: float = 0.0) -> T:
    """Does `work` on rank 0 and hands its result to all; a user's mistake found there is raised on every rank.

    `hours`: for work that may take longer than a collective (--ddp_timeout). The others then wait outside of one, at
    most so long.
    """
    outcome: tuple[str, Any] = ("failed", None)
    try:
        if global_rank() == 0:
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


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
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
    told = all_gather_objects(None if mistake is None else (type(mistake).__name__, mistake.problems))
    for kind, problems in filter(None, told):
        raise mistake or getattr(errors, kind, UserError)(problems)
    return [value for share in all_gather_objects(found) for value in share]


def split_work(rows: Sequence[Any], work: Callable[[Sequence[Any]], list[T]]) -> list[T]:
    """`work` on consecutive shares of `rows`, one a rank; all results, in order, on every rank. A user's mistake is
    raised on all."""
    mine = slice(
        len(rows) * global_rank() // global_world_size(), len(rows) * (global_rank() + 1) // global_world_size()
    )
    return [one for share in run_on_all_ranks(lambda: work(rows[mine])) for one in share]
