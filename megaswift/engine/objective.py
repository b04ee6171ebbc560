"""The objective of a global batch, for any engine: counts before the forward pass, the loss callback, the report.

Each term is divided once, by its count over all data-parallel ranks and micro-batches. The engines compute the outputs
of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
    gather_from_one_rank,
)
from megaswift.parallel.layout import Coordinates, Layout


class ReadNumbers(Protocol):
    """Reads scalars [] from the device."""

    def __call__(self, more: Sequence[Tensor], groups: Sequence[Any] = ()) -> list[float]:
        """Return the numbers `more`, each first summed over its process group in `groups`. Without `groups`, all of
        them are sums already."""


class StepNumbers(Protocol):
    """Scalars [] of a step, in two stages: summed over ranks on the device, then read by the host. Further device work
    may be launched in between."""

    def reduce(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[Tensor]:
        """Sum the numbers over ranks on the device; `groups` as in `ReadNumbers`. Collective; called once."""

    def start_read(self, more: Sequence[Tensor] = ()) -> Callable[[], list[float]]:
        """Start to copy the numbers `more`, the same on all ranks, to the host. Return a function that waits for them
        and returns them. Collective; call it once, after `reduce`."""


class ParallelContextProtocol(Protocol):
    """The part of a parallel context that this module uses."""

    layout: Layout
    coordinates: Coordinates
    device: torch.device
    groups: Any
    """Has the process groups `dp` and, with pipeline parallelism, `pp`."""


def start_count_global_batch(
    microbatches: Sequence[Batch], loss: Loss, context: ParallelContextProtocol, further: Sequence[float] = ()
) -> StartedCount:
    """Start to count the global batch, by one reduction over all ranks. Collective.

    Args:
        microbatches: Those of this rank. A rank that has no batch passes none; the step cannot be taken then.
        loss: Counts what its terms are divided by.
        context: This rank's place in the layout.
        further: Further numbers of this rank to sum over all ranks; every rank passes the same number of them.

    Returns:
        A function that waits until the counts are on the host. It is not collective.
    """
    names = loss.reported.counts
    sums = torch.zeros(len(names) + 3, dtype=torch.float64)
    place = context.coordinates
    if place.tp == place.pp == place.cp == 0:  # the other ranks of a replica have the same batches
        for batch in microbatches:
            counts = loss.counts(batch)
            sizes = [batch.tokens, batch.label_tokens, int(batch.tokens > 0)]
            sums += torch.tensor([*(counts[name] for name in names), *sizes], dtype=torch.float64)
    sums = torch.cat([sums, torch.tensor(further, dtype=torch.float64)])
    if context.layout.world_size > 1:
        sums = copy_to_device_async(sums, context.device)
        dist.all_reduce(sums)
    copied = HostCopy(sums)

    def finish() -> GlobalBatchCounts:
        values = copied.wait()
        counts = dict(zip(names, values, strict=False))  # `values` goes on after the counts
        tokens, label_tokens, real_microbatches = (round(value) for value in values[len(names) : len(names) + 3])
        return GlobalBatchCounts(counts, tokens, label_tokens, real_microbatches, tuple(values[len(names) + 3 :]))

    return finish


def all_sum_on_device(values: Tensor) -> Tensor:
    """Sum a tensor on this rank's device over all ranks, in place; no host waits. Collective."""
    if distributed.global_world_size() > 1:
        dist.all_reduce(values)
    return values


class _GatherFromRanks(torch.autograd.Function):
    """x [...] of each rank of a group to [ranks, ...]. Gradients are summed over the ranks: an all-reduce of `ranks`
    times the bytes that are used, of tensors as small as one vector a document."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """All ranks' tensors."""
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        """This rank's part of the sum over ranks."""
        total = grads.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def gather_over_dp(x: Tensor, context: ParallelContextProtocol) -> Tensor:
    """Return the tensors x [...] of all data-parallel ranks as [ranks, ...], differentiable. Collective."""
    if context.layout.dp == 1:
        return gather_from_one_rank(x)
    gathered: Tensor = _GatherFromRanks.apply(x, context.groups.dp)
    return gathered


def named_head_outputs(
    fields: Tensor, needs: RequestedModelOutputs, context: ParallelContextProtocol | None = None
) -> ModelOutputs:
    """Return the head's output [f, b, s] as named fields [b, s] or, of a separate head, as vectors [b, s, f]; fields
    that the loss does not differentiate are detached. With `context`, tensors of all data-parallel ranks can be
    gathered."""
    if needs.head:
        outputs = ModelOutputs(values=fields[0] if len(fields) == 1 else None, vectors=fields.permute(1, 2, 0))
        if context is None:
            return outputs
        return replace(outputs, gather=partial(gather_over_dp, context=context), rank=context.coordinates.dp)
    named: dict[str, Any] = {
        name: fields[i] if name in needs.differentiable else fields[i].detach() for i, name in enumerate(needs.names)
    }
    count = len(needs.names)
    return ModelOutputs(
        **named,
        ahead=fields[count : count + needs.ahead] if needs.ahead else None,
        divergence=fields[-1] if needs.divergence is not None else None,
    )


def states_at_labels(batch: Batch, fields: Tensor) -> Tensor:
    """Return the hidden states [labels, h] of fields [h, b, s] at the labels of the batch, row by row."""
    return fields.flatten(1).t().index_select(0, label_positions(batch).to(fields.device))


def label_positions(batch: Batch) -> Tensor:
    """Return the positions of labels in the flat [b x s], int64 [labels]."""
    return (batch.loss_weights != 0).flatten().nonzero().squeeze(1)


class GlobalBatchLossCallback:
    """The loss callback of one global batch. Collects the reported numbers of each micro-batch, on the last pipeline
    stage."""

    def __init__(self, loss: Loss, counted: GlobalBatchCounts, context: ParallelContextProtocol | None = None) -> None:
        self.loss = loss
        self.counts = counted.counts
        self.context = context
        self.order = ReportOrder(loss.reported)
        self.rows: list[list[Tensor | float]] = []
        """The numbers of each micro-batch, in `order`."""

    def __call__(self, batch: Batch, fields: Tensor) -> Tensor:
        """Return the scalar to differentiate: this micro-batch's share of the global batch's objective."""
        terms, metrics = self.loss(named_head_outputs(fields, self.loss.needs, self.context), batch)
        total = fields.new_zeros(())
        values: dict[str, Tensor] = {}
        for term in terms:
            value = term.weight * term.sum / (self.counts[term.denominator] or 1.0)
            values[term.name] = value.detach()
            total = total + value
        self.rows.append(self.order.row(values, metrics))
        return total


class StepReport:
    """The reported numbers of a global batch, read from the device in one copy, with whatever else the host needs."""

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
        """Further metrics [], which have the same value on every rank and pipeline stage."""
        self.result = StepResult(0.0)
        """The result of the step, once it was read."""
        self.before_read: Callable[[], None] = lambda: None
        """Called once all passes are launched, before the host waits for them; may be collective."""
        self.last = context.coordinates.pp == context.layout.pp - 1
        """Whether this is the last pipeline stage, which computes the loss."""
        self._shares = torch.zeros(0, dtype=torch.float64, device=context.device)
        """[micro-batches]: each one's share of the objective, on the last stage."""
        self._numbers = torch.zeros(objective.order.size, dtype=torch.float64, device=context.device)
        """The reported numbers in the order of `ReportOrder`, once `reduce` has run."""

    def reduce(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[Tensor]:
        """Sum the report over the ranks, on the device, and with it the numbers `more` [] of this rank, which are
        returned; `groups` as in `ReadNumbers`. Collective; call it once, after the last micro-batch.

        Numbers that are summed over the data-parallel ranks share the report's reduction.
        """
        self.before_read()
        context = self.context
        summed = list(more)

        # Numbers that cannot share the report's reduction
        reduces = self.last and context.layout.dp > 1
        sharing = [i for i, group in enumerate(groups) if reduces and _has_ranks_of(group, context.groups.dp)]
        for i, group in enumerate(groups):
            if i not in sharing:
                dist.all_reduce(summed[i], group=group)

        # The report, with the others
        if self.last:
            order = self.objective.order
            rows = _on_device(self.objective.rows, context.device)
            self._shares = rows[:, : len(order.terms)].sum(1)
            numbers = _reduced_over_dp(rows, order, context, [summed[i] for i in sharing])
            self._numbers = numbers[len(sharing) :]
            for place, i in enumerate(sharing):
                summed[i] = numbers[place]
        return summed

    def start_read(self, more: Sequence[Tensor] = ()) -> Callable[[], list[float]]:
        """Start to copy the report and the numbers `more` [] to the host. Collective; call it after `reduce`.

        Returns:
            A function that waits for the copy, sets `result` from the report, and returns the numbers.
        """
        stages = self.context.layout.pp
        if stages > 1:  # the other stages have no loss; the host does not wait for the broadcast
            dist.broadcast(self._numbers, group=self.context.groups.pp, group_src=stages - 1)
        further = [number.detach().reshape(1).double() for number in (*self.metrics.values(), *more)]
        copied = HostCopy(torch.cat([self._shares, self._numbers, *further]))

        def finish() -> list[float]:
            values = iter(copied.wait())
            shares = list(itertools.islice(values, len(self._shares)))
            numbers = list(itertools.islice(values, len(self._numbers)))
            report = self.objective.order.named(numbers, self.counted.counts)
            metrics = dict(zip(self.metrics, values, strict=False))  # `values` goes on with `more`
            self.result = StepResult(
                report.loss,
                {**report.metrics, **metrics},
                tokens=self.counted.tokens,
                label_tokens=self.counted.label_tokens,
                counts=self.counted.counts,
                parts=_shares_and_samples(shares, self.microbatches) if shares else (),
                compute_seconds=self.clock.take(),
                addends=report.addends,
            )
            return list(values)

        return finish

    def read(self, more: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> list[float]:
        """Reduce the numbers, and wait until the host has read them. Collective."""
        return self.start_read(self.reduce(more, groups))()

    def read_result(self) -> StepResult:
        """Reduce and read the report, without further numbers."""
        self.read()
        return self.result


def _shares_and_samples(shares: Sequence[float], microbatches: Sequence[Batch]) -> tuple[MicrobatchLossAndSamples, ...]:
    """Return each micro-batch's share of the objective with the ids of its samples. `microbatches` are in host
    memory."""
    rows = [() if b.sample_ids is None else tuple(i for i in b.sample_ids.tolist() if i >= 0) for b in microbatches]
    return tuple(MicrobatchLossAndSamples(share, ids) for share, ids in zip(shares, rows, strict=True))


def _has_ranks_of(group: Any, other: Any) -> bool:
    return group is other or dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


def _on_device(rows: Sequence[Sequence[Tensor | float]], device: torch.device) -> Tensor:
    """Return the rows of numbers and tensors [] or [n] as float64 [micro-batches, numbers] on the device. Values in
    host memory, which are single numbers, take one asynchronous copy."""
    values = [value for row in rows for value in row]
    on_host = [float(v) for v in values if not (isinstance(v, Tensor) and v.device.type == device.type)]
    copied: Iterator[Tensor] = iter(())
    if on_host:
        copied = iter(copy_to_device_async(torch.tensor(on_host, dtype=torch.float64), device).split(1))
    numbers = [
        v.detach().reshape(-1).double() if isinstance(v, Tensor) and v.device.type == device.type else next(copied)
        for v in values
    ]
    return torch.cat(numbers).view(len(rows), -1)


def _reduced_over_dp(
    rows: Tensor, order: ReportOrder, context: ParallelContextProtocol, further: Sequence[Tensor]
) -> Tensor:
    """Return the `further` numbers [], then the numbers of the report, in one tensor: sums, maxima and minima over the
    data-parallel ranks and, for the report, over `rows`, one for each micro-batch of this rank. One reduction on the
    device. Collective."""
    # Over this rank's micro-batches; a minimum is the negative of a maximum
    summed = rows[:, : order.added].sum(0)
    largest = rows[:, order.added : order.added + len(order.largest)].amax(0)
    smallest = rows[:, order.added + len(order.largest) :].amin(0)
    summed = torch.cat([*(number.detach().reshape(1).double() for number in further), summed])
    compared = torch.cat([largest, -smallest])
    ranks = context.layout.dp
    if ranks > 1:
        # Over the ranks: maxima go into a row of zeros of their own rank, so that one sum gathers them
        group = context.groups.dp
        by_rank = torch.zeros(ranks, len(compared), dtype=torch.float64, device=context.device)
        by_rank[dist.get_rank(group)] = compared
        joined = torch.cat([summed, by_rank.view(-1)])
        dist.all_reduce(joined, group=group)
        by_rank = joined[len(summed) :].view(ranks, -1)
        summed = joined[: len(summed)]
        compared = by_rank.amax(0) if len(compared) else compared
    return torch.cat([summed, compared[: len(largest)], -compared[len(largest) :]])
