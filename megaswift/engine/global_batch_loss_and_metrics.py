"""The objective of a global batch, for any engine: counts before the forward pass, the loss callback, what is reported.

A term is divided once, by its count over all data-parallel ranks and micro-batches. How a model computes its outputs is
the engines'.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.device_copy import copy_to_device_async
from megaswift.engine.protocol import GlobalBatchCounts, MicrobatchLossAndSamples
from megaswift.losses.contract import (
    Batch,
    DifferenceMetric,
    Loss,
    MaxMetric,
    MeanMetric,
    Metric,
    MinMetric,
    ModelOutputs,
    RequestedModelOutputs,
    SumMetric,
)
from megaswift.parallel.layout import Coordinates, Layout


class ParallelContextProtocol(Protocol):
    """What of a parallel context is needed here."""

    layout: Layout
    coordinates: Coordinates
    device: torch.device
    groups: Any
    """With the process groups `dp` and, where there is a pipeline, `pp`."""


MOST_COUNTS = 6
"""Counts that a loss may have: the reduction has room for so many, so that a rank without a batch can take part."""


def count_global_batch(
    microbatches: Sequence[Batch], loss: Loss, context: ParallelContextProtocol, beside: Sequence[float] = ()
) -> GlobalBatchCounts:
    """Counts the global batch, by one reduction over all ranks. Collective.

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
    values = sums.tolist()
    tokens, label_tokens, real_microbatches = (round(value) for value in values[MOST_COUNTS : MOST_COUNTS + 3])
    counts_by_name = dict(zip(names, values, strict=False))
    return GlobalBatchCounts(counts_by_name, tokens, label_tokens, real_microbatches, tuple(values[MOST_COUNTS + 3 :]))


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

    def __call__(self, batch: Batch, fields: Tensor) -> Tensor:
        """The scalar to differentiate: this micro-batch's part of the global batch's objective."""
        terms, metrics = self.loss(named_head_outputs(fields, self.loss.needs), batch)
        total = fields.new_zeros(())
        values: dict[str, Tensor] = {}
        for term in terms:
            value = term.weight * term.sum / (self.counts[term.denominator] or 1.0)
            values[term.name] = value.detach()
            total = total + value
        self.parts.append((values, dict(metrics)))
        return total

    @functools.cached_property
    def on_host(self) -> list[tuple[dict[str, float], dict[str, Metric]]]:
        """`parts` as numbers, by one read of the device. After the last micro-batch."""
        values = [v for terms, metrics in self.parts for v in (*terms.values(), *_operands(metrics))]
        tensors = [v.detach().reshape(()) for v in values if isinstance(v, Tensor)]
        same = [t.to(tensors[0].device, torch.float64) for t in tensors]
        sums = iter(torch.stack(same).tolist() if same else [])
        numbers = iter([next(sums) if isinstance(v, Tensor) else float(v) for v in values])
        return [
            ({name: next(numbers) for name in terms}, {name: _filled(m, numbers) for name, m in metrics.items()})
            for terms, metrics in self.parts
        ]

    def local(self, microbatches: Sequence[Batch]) -> tuple[MicrobatchLossAndSamples, ...]:
        """Each micro-batch's share of the objective with its samples, for `StepResult.parts`. `microbatches`: as they
        came, in host memory."""
        rows = [() if b.sample_ids is None else tuple(i for i in b.sample_ids.tolist() if i >= 0) for b in microbatches]
        shares = [sum(terms.values()) for terms, _ in self.on_host]
        return (
            tuple(MicrobatchLossAndSamples(share, ids) for share, ids in zip(shares, rows, strict=True))
            if shares
            else ()
        )


def _operands(metrics: Mapping[str, Metric]) -> Iterator[Tensor | float]:
    """The values of metrics, in the order of their fields; a difference has none of its own."""
    for metric in metrics.values():
        if not isinstance(metric, DifferenceMetric):
            yield from vars(metric).values()


def _filled(metric: Metric, numbers: Iterator[float]) -> Metric:
    """The metric with the next numbers in place of its values."""
    return metric if isinstance(metric, DifferenceMetric) else type(metric)(*(next(numbers) for _ in vars(metric)))


def _local_sums(objective: GlobalBatchLossCallback) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(values that add up, largest, smallest) over this rank's micro-batches; means as two sums."""
    add: dict[str, float] = {}
    high: dict[str, float] = {}
    low: dict[str, float] = {}
    for terms, metrics in objective.on_host:
        for name, value in terms.items():
            add[f"term/{name}"] = add.get(f"term/{name}", 0.0) + value
        for name, metric in metrics.items():
            if isinstance(metric, MeanMetric):
                add[f"sum/{name}"] = add.get(f"sum/{name}", 0.0) + float(metric.sum)
                add[f"count/{name}"] = add.get(f"count/{name}", 0.0) + float(metric.count)
            elif isinstance(metric, SumMetric):
                add[f"total/{name}"] = add.get(f"total/{name}", 0.0) + float(metric.value)
            elif isinstance(metric, MaxMetric):
                high[name] = max(high.get(name, -float("inf")), float(metric.value))
            elif isinstance(metric, MinMetric):
                low[name] = min(low.get(name, float("inf")), float(metric.value))
    return add, high, low


def _reduce(
    values: dict[str, float], op: dist.ReduceOp.RedOpType, context: ParallelContextProtocol
) -> dict[str, float]:
    if not values or context.layout.dp == 1:
        return values
    names = sorted(values)
    tensor = copy_to_device_async(torch.tensor([values[n] for n in names], dtype=torch.float64), context.device)
    dist.all_reduce(tensor, op, context.groups.dp)
    return dict(zip(names, tensor.tolist(), strict=True))


def reduce_objective_report(
    objective: GlobalBatchLossCallback, context: ParallelContextProtocol
) -> tuple[float, dict[str, float]]:
    """(objective, metrics) of the global batch, on every rank: reduced on the last stage, then sent to the others."""
    layout, coords = context.layout, context.coordinates
    result: tuple[float, dict[str, float]] = (0.0, {})
    if coords.pp == layout.pp - 1:
        add, high, low = _local_sums(objective)
        add = _reduce(add, dist.ReduceOp.SUM, context)
        high, low = _reduce(high, dist.ReduceOp.MAX, context), _reduce(low, dist.ReduceOp.MIN, context)
        total, metrics = _finish(add, high, low)
        result = (total, metrics | _differences(objective, metrics))
    if layout.pp > 1:
        result = distributed.broadcast_object(result, layout.pp - 1, context.groups.pp, context.device)
    return result


def _differences(objective: GlobalBatchLossCallback, metrics: dict[str, float]) -> dict[str, float]:
    """Differences of metrics that are reduced already: the same on every rank, so nothing is sent."""
    differences = {
        name: m
        for _, metrics_of in objective.parts
        for name, m in metrics_of.items()
        if isinstance(m, DifferenceMetric)
    }
    return {
        name: metrics[m.of] - metrics[m.less]
        for name, m in differences.items()
        if m.of in metrics and m.less in metrics
    }


def _finish(add: dict[str, float], high: dict[str, float], low: dict[str, float]) -> tuple[float, dict[str, float]]:
    terms = {n.removeprefix("term/"): v for n, v in add.items() if n.startswith("term/")}
    metrics = {n.removeprefix("total/"): v for n, v in add.items() if n.startswith("total/")}
    for name, value in add.items():
        if name.startswith("sum/"):
            total = add["count/" + name.removeprefix("sum/")]
            if total:
                metrics[name.removeprefix("sum/")] = value / total
    metrics.update(high)
    metrics.update(low)
    if len(terms) > 1:
        metrics.update(terms)
    return sum(terms.values()), metrics
