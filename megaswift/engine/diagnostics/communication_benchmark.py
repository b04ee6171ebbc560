"""Times collectives and point-to-point transfers of process groups.

All groups of one name run at once, as in training. Owns the operations and their timing; formulas and groups of a
layout are in `parallel/link_rates.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaswift import distributed
from megaswift.parallel.link_rates import operations_of, rounded_size

DTYPE = torch.float32
SHARE = 0.5
"""The share of the remaining time that a measurement may take: the estimate from one call is rough."""


@dataclass(frozen=True)
class CommunicationTiming:
    """One operation with one size, of all groups of a name."""

    group: str
    operation: str
    size: int
    """Bytes, as nccl-tests counts them: of the whole buffer, of all ranks together for a gathered or scattered one."""
    repeats: int
    seconds: float
    """Seconds of one call in the slowest group."""
    fastest_seconds: float
    """Seconds of one call in the fastest group."""
    slowest_ranks: tuple[int, ...]


@dataclass(frozen=True)
class CommunicationPlan:
    """What is measured, and for how long."""

    groups: Mapping[str, Sequence[Sequence[int]]]
    operations: Sequence[str]
    sizes: Sequence[int]
    seconds: float
    repeats: int = 200
    """At most so many calls of one measurement."""

    def measurements(self) -> list[tuple[int, str, str]]:
        """Return (size, group, operation) of each measurement, small sizes first: a lack of time drops the largest."""
        return [
            (size, group, operation)
            for size in sorted(self.sizes)
            for group in self.groups
            for operation in operations_of(group, self.operations)
        ]


def run_benchmark(
    plan: CommunicationPlan, device: torch.device, after_each: Callable[[CommunicationTiming], None] | None = None
) -> tuple[list[CommunicationTiming], list[tuple[int, str, str]]]:
    """Measure collectives as far as the time allows. Collective; the same on every rank.

    `after_each` is called with each timing as soon as it is there. Returns the timings, and the measurements for which
    there was no time.
    """
    mine = {name: _own_group(groups) for name, groups in plan.groups.items()}
    measurements = plan.measurements()
    timings: list[CommunicationTiming] = []
    start = time.perf_counter()
    for number, (size, name, operation) in enumerate(measurements):
        left = plan.seconds - distributed.all_max([time.perf_counter() - start])[0]
        if left <= 0:
            return timings, measurements[number:]
        group, ranks = mine[name]
        bytes_moved = rounded_size(size, len(ranks), DTYPE.itemsize)
        call = _operation(operation, group, ranks, bytes_moved // DTYPE.itemsize, device)
        share = SHARE * left / (len(measurements) - number)
        repeats, seconds = _seconds_of_call(call, device, share, plan.repeats)
        timings.append(_slowest_group(name, operation, (bytes_moved, repeats, seconds), plan.groups[name]))
        if after_each is not None:
            after_each(timings[-1])
    return timings, []


def _own_group(groups: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup, Sequence[int]]:
    """This rank's group; every rank makes all of them."""
    made = [(dist.new_group(list(ranks)), ranks) for ranks in groups]
    return next((group, ranks) for group, ranks in made if dist.get_rank() in ranks)


def _seconds_of_call(call: Callable[[], None], device: torch.device, share: float, most: int) -> tuple[int, float]:
    """(repeats, mean seconds): as many calls as fit into `share` seconds, at most `most`, after two that are not
    counted."""
    call()  # connects the ranks
    _timed(call, 1, device)
    estimate = distributed.all_max([_timed(call, 1, device)])[0]
    repeats = max(1, min(most, int(share / max(estimate, 1e-7))))
    return repeats, _timed(call, repeats, device)


def _timed(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _slowest_group(
    name: str, operation: str, measured: tuple[int, int, float], groups: Sequence[Sequence[int]]
) -> CommunicationTiming:
    size, repeats, own = measured
    of_ranks = distributed.all_gather_objects(own)
    of_groups = [max(of_ranks[rank] for rank in ranks) for ranks in groups]
    slowest = max(range(len(groups)), key=of_groups.__getitem__)
    ranks = tuple(groups[slowest])
    return CommunicationTiming(name, operation, size, repeats, of_groups[slowest], min(of_groups), ranks)


def _operation(
    name: str, group: dist.ProcessGroup, ranks: Sequence[int], count: int, device: torch.device
) -> Callable[[], None]:
    """What one call does. `count`: elements of the operation's size, a multiple of the ranks."""
    whole = torch.zeros(count, dtype=DTYPE, device=device)
    other = torch.zeros_like(whole)
    part = torch.zeros(count // len(ranks), dtype=DTYPE, device=device)

    def send_recv() -> None:
        """To the next rank, from the one before, all at once."""
        index = list(ranks).index(dist.get_rank())
        following = ranks[(index + 1) % len(ranks)]
        before = ranks[index - 1]
        transfers = [
            dist.P2POp(dist.isend, whole, following, group),
            dist.P2POp(dist.irecv, other, before, group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": send_recv,
    }
    chosen = calls[name]

    def call() -> None:
        chosen()

    return call
