"""The objective of a global batch, for any engine: counts before the forward pass, the loss callback, what is reported.

A term is divided once, by its count over all data-parallel ranks and micro-batches. How a model computes its outputs is
the engines'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.device_copy import HostCopy, copy_to_device_async
from megaswift.engine.diagnostics.compute_time import OwnComputeClock
from megaswift.engine.protocol import GlobalBatchCounts, MicrobatchLossAndSamples, StartedCount, StepResult
from megaswift.engine.reported_numbers import ReportOrder
from megaswift.losses.contract import (
    Batch,
    Loss,
    ModelOutputs,
    RequestedModelOutputs,
)
from megaswift.parallel.layout import Coordinates, Layout


class ReadNumbers(Protocol):
    """Reads scalars [] from the device."""

    def __call__(self, more: Sequence[Tensor], groups: Sequence[Any] = ()) -> list[float]:
        """`groups`: of each number the process group over which it is still to be added up; none where all are
        sums."""


class StepNumbers(Protocol):
    """Scalars [] of a step: added up over ranks, then read from the device, which may be given more to do between."""

    def reduce(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[Tensor]:
        """Sum the numbers over ranks on the device; `groups` as in `ReadNumbers`. Collective; called once."""

    def start_read(self, more: Sequence[Tensor] = ()) -> Callable[[], list[float]]:
        """Waits for numbers that are the same on all ranks, and returns them. After `reduce`; to be called once,
        collective."""


class ParallelContextProtocol(Protocol):
    """What of a parallel context is needed here."""

    layout: Layout
    coordinates: Coordinates
    device: torch.device
    groups: Any
    """With the process groups `dp` and, where there is a pipeline, `pp`."""


def start_count_global_batch(
    microbatches: Sequence[Batch], loss: Loss, context: ParallelContextProtocol, beside: Sequence[float] = ()
) -> StartedCount:
    """Counts the global batch, by one reduction over all ranks. Collective; what is returned is not, and waits for the
    counts, which are on their way to the host meanwhile.

    `beside`: numbers of this rank to add up over all ranks, equally many on each. A rank that has no batch passes no
    micro-batches, and the step cannot be taken.
    """
    names = loss.reported.counts
    sums = torch.zeros(len(names) + 3, dtype=torch.float64)
    place = context.coordinates
    if place.tp == place.pp == place.cp == 0:  # the other ranks of a replica have the same batches
        for batch in microbatches:
            counts = loss.counts(batch)
            real = [batch.tokens, batch.label_tokens, int(batch.tokens > 0)]
            sums += torch.tensor([*(counts[name] for name in names), *real], dtype=torch.float64)
    sums = torch.cat([sums, torch.tensor(beside, dtype=torch.float64)])
    if context.layout.world_size > 1:
        sums = copy_to_device_async(sums, context.device)
        dist.all_reduce(sums)
    copied = HostCopy(sums)

    def finish() -> GlobalBatchCounts:
        values = copied.wait()
        counts = dict(zip(names, values, strict=False))
        tokens, label_tokens, real_microbatches = (round(value) for value in values[len(names) : len(names) + 3])
        return GlobalBatchCounts(counts, tokens, label_tokens, real_microbatches, tuple(values[len(names) + 3 :]))

    return finish


def all_sum_on_device(values: Tensor) -> Tensor:
    """Sum a tensor on this rank's device over all ranks, in place; no host waits. Collective."""
    if distributed.global_world_size() > 1:
        dist.all_reduce(values)
    return values


def named_head_outputs(fields: Tensor, needs: RequestedModelOutputs) -> ModelOutputs:
    """Name the fields [f, b, s] that the head returned."""
    return ModelOutputs(
        **{
            name: fields[i] if name in needs.differentiable else fields[i].detach()
            for i, name in enumerate(needs.names)
        }
    )


class GlobalBatchLossCallback:
    """The loss callback of one global batch; collects what is reported, per micro-batch, on the last pipeline stage."""

    def __init__(self, loss: Loss, counted: GlobalBatchCounts) -> None:
        self.loss = loss
        self.counts = counted.counts
        self.order = ReportOrder(loss.reported)
        self.rows: list[list[Tensor | float]] = []
        """The numbers of each micro-batch, in `order`."""

    def __call__(self, batch: Batch, fields: Tensor) -> Tensor:
        """The scalar to differentiate: this micro-batch's part of the global batch's objective."""
        terms, metrics = self.loss(named_head_outputs(fields, self.loss.needs), batch)
        total = fields.new_zeros(())
        values: dict[str, Tensor] = {}
        for term in terms:
            value = term.weight * term.sum / (self.counts[term.denominator] or 1.0)
            values[term.name] = value.detach()
            total = total + value
        self.rows.append(self.order.row(values, metrics))
        return total


class StepReport:
    """What is reported of a global batch, read from the device at once, with what else the host needs of it then."""

    def __init__(
        self,
        objective: GlobalBatchLossCallback,
        counted: GlobalBatchCounts,
        context: ParallelContextProtocol,
        microbatches: Sequence[Batch],
        clock: OwnComputeClock,
    ) -> None:
        self.objective = objective
        self.counted = counted
        self.context = context
        self.microbatches = microbatches
        self.clock = clock
        self.metrics: dict[str, Tensor] = {}
        """Further metrics [], the same on every rank already; those that are on every pipeline stage."""
        self.result = StepResult(0.0)
        """What was read."""
        self.before_read: Callable[[], None] = lambda: None
        """Called once all passes are launched, before the host waits for them; may be collective."""
        self.last = context.coordinates.pp == context.layout.pp - 1
        """Whether this pipeline stage has the loss."""
        self._shares = torch.zeros(0, dtype=torch.float64, device=context.device)
        """[micro-batches]: each one's share of the objective, on the last stage."""
        self._numbers = torch.zeros(objective.order.size, dtype=torch.float64, device=context.device)
        """The report's, in order; once reduced."""

    def reduce(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[Tensor]:
        """Adds up the report over ranks, on the device, and the numbers `more` [] of this rank, which are returned;
        `groups` as in `ReadNumbers`. Sums over the data-parallel ranks travel with the report's. Collective; once,
        after the last micro-batch."""
        self.before_read()
        context = self.context
        summed = list(more)
        travels = self.last and context.layout.dp > 1
        beside = [i for i, group in enumerate(groups) if travels and _has_ranks_of(group, context.groups.dp)]
        for i, group in enumerate(groups):
            if i not in beside:
                dist.all_reduce(summed[i], group=group)
        if self.last:
            order = self.objective.order
            rows = _on_device(self.objective.rows, context.device)
            self._shares = rows[:, : len(order.terms)].sum(1)
            numbers = _reduced_over_dp(rows, order, context, [summed[i] for i in beside])
            self._numbers = numbers[len(beside) :]
            for place, i in enumerate(beside):
                summed[i] = numbers[place]
        return summed

    def start_read(self, more: Sequence[Tensor] = ()) -> Callable[[], list[float]]:
        """Copies the report, and the numbers `more` [], to the host. What is returned waits for them, makes `result` of
        the report, and returns the numbers. Collective; after `reduce`."""
        stages = self.context.layout.pp
        if stages > 1:  # on the device: the host does not wait
            dist.broadcast(self._numbers, group=self.context.groups.pp, group_src=stages - 1)
        further = [number.detach().reshape(1).double() for number in (*self.metrics.values(), *more)]
        copied = HostCopy(torch.cat([self._shares, self._numbers, *further]))

        def finish() -> list[float]:
            values = iter(copied.wait())
            shares = list(itertools.islice(values, len(self._shares)))
            told = self.objective.order.named(list(itertools.islice(values, len(self._numbers))), self.counted.counts)
            own = dict(zip(self.metrics, values, strict=False))
            self.result = StepResult(
                told.loss,
                {**told.metrics, **own},
                tokens=self.counted.tokens,
                label_tokens=self.counted.label_tokens,
                counts=self.counted.counts,
                parts=_shares_and_samples(shares, self.microbatches) if shares else (),
                compute_seconds=self.clock.take(),
                addends=told.addends,
            )
            return list(values)

        return finish

    def read(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[float]:
        """Reduce the numbers and read them, one after the other."""
        return self.start_read(self.reduce(more, groups))()

    def read_result(self) -> StepResult:
        """Reads the report alone."""
        self.read()
        return self.result


def _shares_and_samples(shares: Sequence[float], microbatches: Sequence[Batch]) -> tuple[MicrobatchLossAndSamples, ...]:
    """Each micro-batch's share of the objective with its samples. `microbatches`: as they came, in host memory."""
    rows = [() if b.sample_ids is None else tuple(i for i in b.sample_ids.tolist() if i >= 0) for b in microbatches]
    return tuple(MicrobatchLossAndSamples(share, ids) for share, ids in zip(shares, rows, strict=True))


def _has_ranks_of(group: Any, other: Any) -> bool:
    return group is other or dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


def _on_device(rows: Sequence[Sequence[Tensor | float]], device: torch.device) -> Tensor:
    """float64 [micro-batches, numbers]; what is in host memory is copied at once, and the host does not wait."""
    values = [value for row in rows for value in row]
    on_host = [float(v) for v in values if not (isinstance(v, Tensor) and v.device.type == device.type)]
    known: Iterator[Tensor] = iter(())
    if on_host:
        known = iter(copy_to_device_async(torch.tensor(on_host, dtype=torch.float64), device).unbind())
    each = [
        v.detach().reshape(()).double() if isinstance(v, Tensor) and v.device.type == device.type else next(known)
        for v in values
    ]
    return torch.stack(each).view(len(rows), -1)


def _reduced_over_dp(
    rows: Tensor, order: ReportOrder, context: ParallelContextProtocol, beside: Sequence[Tensor]
) -> Tensor:
    """`beside` [], then the numbers of a report, from `rows`, those of this rank's micro-batches: summed or compared
    over them and the data-parallel ranks, in one reduction on the device. Collective."""
    summed = rows[:, : order.added].sum(0)
    largest = rows[:, order.added : order.added + len(order.largest)].amax(0)
    smallest = rows[:, order.added + len(order.largest) :].amin(0)
    summed = torch.cat([*(number.detach().reshape(1).double() for number in beside), summed])
    compared = torch.cat([largest, -smallest])
    ranks = context.layout.dp
    if ranks > 1:
        # each rank has a place of its own for what is compared, so that one sum serves both
        group = context.groups.dp
        places = torch.zeros(ranks, len(compared), dtype=torch.float64, device=context.device)
        places[dist.get_rank(group)] = compared
        joined = torch.cat([summed, places.view(-1)])
        dist.all_reduce(joined, group=group)
        places = joined[len(summed) :].view(ranks, -1)
        summed = joined[: len(summed)]
        compared = places.amax(0) if len(compared) else compared
    return torch.cat([summed, compared[: len(largest)], -compared[len(largest) :]])
