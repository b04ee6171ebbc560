"""The objective of a global batch, for any engine: counts before the forward pass, the loss callback, what is reported.

A term is divided once, by its count over all data-parallel ranks and micro-batches. How a model computes its outputs is
the engines'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.device_copy import HostCopy, copy_to_device_async
from megaswift.engine.own_compute_time import OwnComputeClock
from megaswift.engine.protocol import GlobalBatchCounts, MicrobatchLossAndSamples, StartedCount, StepResult
from megaswift.engine.reported_numbers import NamedReport, ReportNames, ReportPlaces, metric_operands
from megaswift.losses.contract import (
    Batch,
    Loss,
    Metric,
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
        """The numbers, added up on the device; `groups` as in `ReadNumbers`. Collective; once."""

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


MOST_COUNTS = 6
"""Counts that a loss may have: the reduction has room for so many, so that a rank without a batch can take part."""


def start_count_global_batch(
    microbatches: Sequence[Batch], loss: Loss, context: ParallelContextProtocol, beside: Sequence[float] = ()
) -> StartedCount:
    """Counts the global batch, by one reduction over all ranks. Collective; what is returned is not, and waits for the
    counts, which are on their way to the host meanwhile.

    `beside`: numbers of this rank to add up over all ranks, equally many on each. A rank that has no batch passes no
    micro-batches, and the step cannot be taken.
    """
    names = sorted(loss.counts(microbatches[0])) if microbatches else []
    assert len(names) <= MOST_COUNTS, names
    unused = [0.0] * (MOST_COUNTS - len(names))
    sums = torch.zeros(MOST_COUNTS + 3, dtype=torch.float64)
    place = context.coordinates
    if place.tp == place.pp == place.cp == 0:  # the other ranks of a replica have the same batches
        for batch in microbatches:
            counts = loss.counts(batch)
            real = [batch.tokens, batch.label_tokens, int(batch.tokens > 0)]
            sums += torch.tensor([*(counts[n] for n in names), *unused, *real], dtype=torch.float64)
    sums = torch.cat([sums, torch.tensor(beside, dtype=torch.float64)])
    if context.layout.world_size > 1:
        sums = copy_to_device_async(sums, context.device)
        dist.all_reduce(sums)
    copied = HostCopy(sums)

    def finish() -> GlobalBatchCounts:
        values = copied.wait()
        tokens, label_tokens, real_microbatches = (round(value) for value in values[MOST_COUNTS : MOST_COUNTS + 3])
        counts, rest = dict(zip(names, values, strict=False)), tuple(values[MOST_COUNTS + 3 :])
        return GlobalBatchCounts(counts, tokens, label_tokens, real_microbatches, rest)

    return finish


def all_sum_on_device(values: Tensor) -> Tensor:
    """Element-wise sum over all ranks, in place, of a tensor on this rank's device: no host waits. Collective."""
    if distributed.global_world_size() > 1:
        dist.all_reduce(values)
    return values


def named_head_outputs(fields: Tensor, needs: RequestedModelOutputs) -> ModelOutputs:
    """[f, b, s] as the head returns them to named fields."""
    return ModelOutputs(
        **{
            name: fields[i] if name in needs.differentiable else fields[i].detach()
            for i, name in enumerate(needs.names)
        }
    )


class GlobalBatchLossCallback:
    """The loss callback of one global batch; collects what is reported, per micro-batch, on the last pipeline stage."""

    def __init__(self, loss: Loss, counted: GlobalBatchCounts) -> None:
        self.loss, self.counts = loss, counted.counts
        self.parts: list[tuple[dict[str, Tensor], dict[str, Metric]]] = []
        """Terms by denominator and name, metrics."""

    def __call__(self, batch: Batch, fields: Tensor) -> Tensor:
        """The scalar to differentiate: this micro-batch's part of the global batch's objective."""
        terms, metrics = self.loss(named_head_outputs(fields, self.loss.needs), batch)
        total = fields.new_zeros(())
        values: dict[str, Tensor] = {}
        for term in terms:
            value = term.weight * term.sum / (self.counts[term.denominator] or 1.0)
            values[f"{term.denominator}/{term.name}"] = value.detach()
            total = total + value
        self.parts.append((values, dict(metrics)))
        return total

    def values(self) -> list[Tensor | float]:
        """Of `parts`, each micro-batch's terms, then its metrics' operands."""
        return [v for terms, metrics in self.parts for v in (*terms.values(), *metric_operands(metrics))]

    def local(self, microbatches: Sequence[Batch], numbers: Sequence[float]) -> tuple[MicrobatchLossAndSamples, ...]:
        """Each micro-batch's share of the objective with its samples, for `StepResult.parts`. `microbatches`: as they
        came, in host memory; `numbers`: `values`, read."""
        rows = [() if b.sample_ids is None else tuple(i for i in b.sample_ids.tolist() if i >= 0) for b in microbatches]
        each = iter(numbers)
        shares = []
        for terms, metrics in self.parts:
            shares.append(sum(next(each) for _ in terms))
            for _ in metric_operands(metrics):
                next(each)
        return (
            tuple(MicrobatchLossAndSamples(share, ids) for share, ids in zip(shares, rows, strict=True))
            if shares
            else ()
        )


SENT = 64
"""Numbers that a report sends through a pipeline before the host knows what they are."""
_names_known: WeakKeyDictionary[Any, dict[int, ReportNames]] = WeakKeyDictionary()
"""Of a pipeline's group: names that the last stage has sent to all others, by their keys."""


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
        self.objective, self.counted, self.context, self.microbatches = objective, counted, context, microbatches
        self.clock = clock
        self.metrics: dict[str, Tensor] = {}
        """Further metrics [], the same on every rank already; those that are on every pipeline stage."""
        self.result = StepResult(0.0)
        """What was read."""
        self.before_read: Callable[[], None] = lambda: None
        """Called once all passes are launched, before the host waits for them; may be collective."""
        self.last = context.coordinates.pp == context.layout.pp - 1
        """Whether this pipeline stage has the loss."""
        self._summed: tuple[list[Tensor | float], ReportPlaces, list[Tensor] | None] = ([], ReportPlaces.of([]), None)

    def reduce(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[Tensor]:
        """Adds up the report over ranks, on the device, and the numbers `more` [] of this rank, which are returned;
        `groups` as in `ReadNumbers`. Sums over the data-parallel ranks travel with the report's. Collective; once,
        after the last micro-batch."""
        self.before_read()
        context = self.context
        spread = context.layout.dp > 1
        reports = self.last and (spread or context.layout.pp > 1)
        values = self.objective.values() if self.last else []
        places = ReportPlaces.of(self.objective.parts if self.last else [])
        beside = [i for i, group in enumerate(groups) if reports and spread and _has_ranks_of(group, context.groups.dp)]
        for i, group in enumerate(groups):
            if i not in beside:
                dist.all_reduce(more[i], group=group)
        reduced = _reduced_over_dp(values, places, context, [more[i] for i in beside]) if reports else None
        self._summed = values, places, None if reduced is None else reduced[len(beside) :]
        sums = dict(zip(beside, reduced or (), strict=False))
        return [sums.get(i, number) for i, number in enumerate(more)]

    def start_read(self, more: Sequence[Tensor] = ()) -> Callable[[], list[float]]:
        """Copies the report, and the numbers `more` [], to the host. What is returned waits for them, makes `result` of
        the report, and returns the numbers; collective. After `reduce`."""
        values, places, reduced = self._summed
        names = ReportNames.of(places, self.objective.parts)
        sent = [self._sent(names, reduced)] if self.context.layout.pp > 1 else []
        own = [v for v in values if isinstance(v, Tensor) and v.device.type == self.context.device.type]
        asked = (*own, *(reduced or ()), *sent, *self.metrics.values(), *more)
        copied = HostCopy(torch.cat([v.detach().reshape(-1).double() for v in asked])) if asked else None

        def finish() -> list[float]:
            numbers = iter(copied.wait() if copied is not None else [])
            of_own = dict(zip(map(id, own), numbers, strict=False))
            local = [of_own[id(v)] if id(v) in of_own else float(v) for v in values]
            joined = [value for kind in places.joined(local) for value in kind.values()]
            joined = joined if reduced is None else list(itertools.islice(numbers, len(reduced)))
            received = list(itertools.islice(numbers, sum(map(len, sent))))
            told = self._received(names, joined, received) if sent else names.named(joined, self.counted.counts)
            self._finish(local, told, numbers)
            return list(numbers)

        return finish

    def read(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[float]:
        """Both at once."""
        return self.start_read(self.reduce(more, groups))()

    def _sent(self, names: ReportNames, reduced: list[Tensor] | None) -> Tensor:
        """What the last pipeline stage sends to all, [2 + SENT]: the key of its names, how many numbers it has, and the
        numbers, where they are not too many. On the device: the host does not wait. Collective."""
        context, stages = self.context, self.context.layout.pp
        message = torch.zeros(2 + SENT, dtype=torch.float64, device=context.device)
        if reduced is not None:
            head = torch.tensor([names.key, len(reduced)], dtype=torch.float64)
            message[:2] = copy_to_device_async(head, context.device)
            if 0 < len(reduced) <= SENT:
                message[2 : 2 + len(reduced)] = torch.stack(reduced)
        dist.broadcast(message, group=context.groups.pp, group_src=stages - 1)
        return message

    def _received(self, own: ReportNames, numbers: list[float], sent: list[float]) -> NamedReport:
        """The report of the last stage, which says once what its numbers are called. All stages of a pipeline know the
        same names."""
        context, (key, count, *values) = self.context, sent
        known = _names_known.setdefault(context.groups.pp, {})
        if key not in known or count > SENT:
            last = context.layout.pp - 1
            told = distributed.broadcast_object((own, numbers), last, context.groups.pp, context.device)
            known[int(key)], values = told
        return known[int(key)].named(values[: int(count)], self.counted.counts)

    def _finish(self, local: list[float], told: NamedReport, numbers: Iterator[float]) -> None:
        """`result`, from the values of this rank, the report, and the next numbers."""
        objective, counted = self.objective, self.counted
        further = dict(zip(self.metrics, numbers, strict=False))
        parts = objective.local(self.microbatches, local) if self.last else ()
        facts = counted.tokens, counted.label_tokens, counted.counts, parts, self.clock.take()
        self.result = StepResult(told.loss, {**told.metrics, **further}, None, False, *facts, addends=told.addends)

    def read_result(self) -> StepResult:
        """Reads the report alone."""
        self.read()
        return self.result


def _has_ranks_of(group: Any, other: Any) -> bool:
    return group is other or dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


def _reduced_over_dp(
    values: Sequence[Tensor | float], places: ReportPlaces, context: ParallelContextProtocol, beside: Sequence[Tensor]
) -> list[Tensor]:
    """`beside` [], then the reported values [] in the order of `places`: summed or compared on the device over
    micro-batches and data-parallel ranks, in one reduction. Each rank has a row of its own for what is compared."""
    device, group = context.device, context.groups.dp
    on_host = [float(v) for v in values if not (isinstance(v, Tensor) and v.device.type == device.type)]
    known = iter(copy_to_device_async(torch.tensor(on_host, dtype=torch.float64), device).unbind())
    each = [
        v.detach().reshape(()).double() if isinstance(v, Tensor) and v.device.type == device.type else next(known)
        for v in values
    ]
    add = [torch.stack([each[i] for i in where]).sum() for where in places.add.values()]
    high = [torch.stack([each[i] for i in where]).amax() for where in places.high.values()]
    low = [-torch.stack([each[i] for i in where]).amin() for where in places.low.values()]
    summed, compared = [*(t.reshape(()).double() for t in beside), *add], [*high, *low]
    ranks = context.layout.dp
    joined = torch.zeros(len(summed) + len(compared) * ranks, dtype=torch.float64, device=device)
    rows = joined[len(summed) :].view(ranks, len(compared))
    if summed:
        joined[: len(summed)] = torch.stack(summed)
    if compared:
        rows[dist.get_rank(group) if ranks > 1 else 0] = torch.stack(compared)
    if ranks > 1:
        dist.all_reduce(joined, group=group)
    largest = rows.amax(0).unbind() if compared else ()
    return [*joined[: len(summed)].unbind(), *largest[: len(high)], *(-t for t in largest[len(high) :])]
