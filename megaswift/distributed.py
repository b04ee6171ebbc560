"""Agreement between the ranks of a run: reductions of numbers, object collectives, errors that are raised on all ranks.

What travels is in host memory. Where the default group is NCCL's alone, it goes through one gloo group of all ranks,
the only one of a run (`start_cpu_group`); else through the default group. Without a process group the functions return
the rank's own values. Collectives of a training step (gradients, activations, losses on the device) belong to the
engines.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import errors
from megaswift.errors import CheckpointError, Problem, UserError, storage_error

K = TypeVar("K")
T = TypeVar("T")
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
_WAIT_NUMBERS = itertools.count()
"""Names of the keys in the store. Every rank waits equally often and in the same order."""


PATIENCE = 24.0
"""Hours that ranks wait at most for others that write to disk and make progress."""


@dataclass(frozen=True)
class PatientWait:
    """A wait for other ranks' work, which may take longer than --ddp_timeout while they make progress."""

    ranks: tuple[int, ...]
    arrived: str = ""
    """A rank that is no longer waited for has set the key of this name and its number in the store; empty: none has
    one."""


patient_waits: list[PatientWait] = []
"""In which the main thread is, the innermost last; the monitor of collectives ends those without progress."""


@contextmanager
def waiting_for(ranks: Iterable[int], arrived: str = "") -> Iterator[None]:
    """Marks what the main thread does inside as a wait for these ranks."""
    patient_waits.append(PatientWait(tuple(ranks), arrived))
    try:
        yield
    finally:
        patient_waits.pop()


_cpu_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Default group -> the gloo group beside it."""


def start_cpu_group(timeout: datetime.timedelta) -> None:
    """Makes the group for tensors in host memory, beside a default group that takes none. Collective.

    Two ranks connect when they first have something for each other, not each with every other one at the start: among
    1,024 ranks these would be 523,776 connections. A torch that does not know the variable ignores it.
    """
    asked = os.environ.get(LAZY_GLOO)
    os.environ[LAZY_GLOO] = "1" if asked is None else asked
    try:
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="cpu")
    finally:
        if asked is None:
            del os.environ[LAZY_GLOO]
    _cpu_groups[dist.group.WORLD] = group


def cpu_group() -> Any:
    """The group of all ranks that takes tensors in host memory; None: the default group does, or there is none."""
    world = dist.group.WORLD if dist.is_available() else None
    return None if world is None else _cpu_groups.get(world)


def _several(group: Any = None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def global_rank() -> int:
    """Global rank, 0 without a process group."""
    return dist.get_rank() if _several() else 0


def global_world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if _several() else 1


def barrier() -> None:
    """Returns once every rank has called it."""
    if _several():
        dist.barrier(group=cpu_group())


def _reduce(values: Sequence[float], operation: Any) -> list[float]:
    if not _several():
        return [float(v) for v in values]
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=operation, group=cpu_group())
    return tensor.tolist()


def all_max(values: Sequence[float]) -> list[float]:
    """Element-wise maximum over the ranks (float64: exact for whole numbers up to 2^53)."""
    return _reduce(values, dist.ReduceOp.MAX)


def all_sum(values: Sequence[float]) -> list[float]:
    """Element-wise sum over the ranks (float64: exact for whole numbers up to 2^53)."""
    return _reduce(values, dist.ReduceOp.SUM)


def all_min_(values: Tensor) -> None:
    """Element-wise minimum over the ranks, in place, of a CPU tensor."""
    if _several():
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=cpu_group())


def all_gather_objects(value: T) -> list[T]:
    """The value of every rank, in rank order, on each of them."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=cpu_group())
    return values


def gather_on_rank0(value: T) -> list[T] | None:
    """The value of every rank, in rank order, on rank 0; None elsewhere."""
    if not _several():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if global_rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=cpu_group())
    return values


def all_gather_merged_dict(share: Mapping[K, T]) -> dict[K, T]:
    """The entries of all ranks in one dict, on every rank; of equal keys the highest rank's value."""
    return {key: value for part in all_gather_objects(dict(share)) for key, value in part.items()}


def broadcast_object(value: T, src: int = 0, group: Any = None, device: torch.device | None = None) -> T:
    """The value of rank `src` of all ranks, or of `group`, whose backend takes tensors of `device`, on each of them."""
    if not _several(group):
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group=cpu_group() if group is None else group, group_src=src, device=device)
    return values[0]


def raise_on_all_ranks(
    problems: Sequence[Problem], error: type[UserError] = CheckpointError, limit: int | None = None
) -> None:
    """Raises `error` with the problems of all ranks, each once, on every rank; returns where no rank has one.
    Collective. Problems beyond `limit` are counted in a last one."""
    everyone = list(dict.fromkeys(problem for own in all_gather_objects(list(problems)) for problem in own))
    if limit is not None and len(everyone) > limit:
        everyone = [*everyone[:limit], Problem(f"{len(everyone) - limit} more", "of the same kind")]
    if everyone:
        raise error(everyone)


def _wait_for_rank0(hours: float) -> None:
    """Returns on every rank once rank 0 has called it. Uses the store of the default group, so that no collective is
    pending meanwhile and none times out."""
    store = dist.distributed_c10d._get_default_store()
    name = f"megaswift/{next(_WAIT_NUMBERS)}"
    if global_rank() == 0:
        store.set(name, "done")
    else:
        with waiting_for([0]):
            store.wait([name], datetime.timedelta(hours=hours))


def untimed_barrier(hours: float) -> None:
    """Returns once every rank has called it, which may take longer than --ddp_timeout: no collective is pending
    meanwhile."""
    if not _several():
        return
    store = dist.distributed_c10d._get_default_store()
    name = f"megaswift/{next(_WAIT_NUMBERS)}"
    store.set(f"{name}/arrived/{global_rank()}", "")
    if store.add(f"{name}/arrived", 1) == global_world_size():
        store.set(name, "done")
    with waiting_for(range(global_world_size()), f"{name}/arrived/"):
        store.wait([name], datetime.timedelta(hours=hours))


def _error_of(name: str, problems: Sequence[Problem]) -> UserError:
    """An error of another rank, by the name of its class: exceptions are not sent, their arguments are."""
    return getattr(errors, name, UserError)(problems)


def run_on_rank0(work: Callable[[], T], hours: float = 0.0) -> T:
    """The result of `work`, which runs on rank 0, on every rank. A UserError or OSError there is raised on every rank;
    any other exception is raised on rank 0, and a RuntimeError on the others.

    `hours`: for work that may take longer than --ddp_timeout. The other ranks then wait at most so long, outside of a
    collective.
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
        reported = storage_error(error) or CheckpointError(
            Problem(
                str(error.filename or "writing the output"), error.strerror or str(error), "use another --output_dir"
            )
        )
        outcome = (type(reported).__name__, reported.problems)
    finally:  # on every exception of rank 0: the others are in this broadcast already
        if _several() and hours:
            _wait_for_rank0(hours)
        outcome = broadcast_object(outcome)
    kind, value = outcome
    if kind == "done":
        return value
    if kind == "failed":
        raise RuntimeError("rank 0 failed; see its message")
    raise _error_of(kind, value)


def run_and_gather_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """The result of every rank's `work`, in rank order, on every rank. A UserError, or an OSError that
    `errors.storage_error` explains, on one rank is raised on all."""
    own_error: UserError | None = None
    results: list[T] = []
    try:
        results.append(work())
    except UserError as error:
        own_error = error
    except OSError as error:
        own_error = storage_error(error)
        if own_error is None:
            raise
    failures = all_gather_objects(None if own_error is None else (type(own_error).__name__, own_error.problems))
    for name, problems in filter(None, failures):
        raise own_error or _error_of(name, problems)
    return [result for share in all_gather_objects(results) for result in share]


def map_over_ranks(rows: Sequence[Any], work: Callable[[Sequence[Any]], list[T]]) -> list[T]:
    """`work` on consecutive shares of `rows`, one per rank; all results, in order, on every rank. A UserError is raised
    on all ranks."""
    rank = global_rank()
    ranks = global_world_size()
    share = rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]
    return [result for results in run_and_gather_on_all_ranks(lambda: work(share)) for result in results]
