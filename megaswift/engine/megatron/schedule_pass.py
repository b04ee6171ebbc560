"""Forward and backward over a global batch on Megatron-Core's own schedules, with one normaliser per loss term.

Owns the counts that are summed before the forward pass, the loss callback, and the reduction of what is reported. A term is
divided once, by its count over all data-parallel ranks and micro-batches; Megatron divides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaswift.engine.megatron.context import ParallelContext
from megaswift.engine.megatron.lora_layers import sum_partial_gradients
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.passes import Pass, prepare
from megaswift.losses.contract import FIELDS, Batch, Loss, Max, Mean, Metric, Min, Needs, Outputs, Sum


@dataclass(frozen=True)
class GlobalCounts:
    """Sums over data-parallel ranks and micro-batches, context-parallel replicas once."""

    counts: dict[str, float]
    tokens: int
    label_tokens: int
    microbatches: int
    """Those with any token: fillers of uneven ends do not count."""


def count(microbatches: Sequence[Batch], loss: Loss, context: ParallelContext) -> GlobalCounts:
    """Count the global batch. Every rank needs the same names, so they come from the first micro-batch."""
    names = sorted(loss.counts(microbatches[0]))
    sums = torch.zeros(len(names) + 3, dtype=torch.float64)
    for batch in microbatches:
        found = loss.counts(batch)
        real = [batch.tokens, batch.label_tokens, int(batch.tokens > 0)]
        sums += torch.tensor([*(found[n] for n in names), *real], dtype=torch.float64)
    sums = sums.to(context.device)
    if context.layout.dp > 1:
        dist.all_reduce(sums, group=context.groups.dp)
    values = sums.tolist()
    return GlobalCounts(dict(zip(names, values, strict=False)), round(values[-3]), round(values[-2]), round(values[-1]))


def outputs_of(fields: Tensor, needs: Needs) -> Outputs:
    """[f, b, s] as the head returns them to named fields."""
    names = [f for f in FIELDS if f in needs.fields]
    return Outputs(**{name: fields[i].detach() if name == "correct" else fields[i] for i, name in enumerate(names)})


class Objective:
    """The loss callback of one global batch; collects what is reported, per micro-batch, on the last pipeline stage."""

    def __init__(self, loss: Loss, counted: GlobalCounts) -> None:
        self.loss, self.counts = loss, counted.counts
        self.parts: list[tuple[dict[str, Tensor], dict[str, Metric]]] = []

    def __call__(self, step: Pass, fields: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(scalar to differentiate, no tokens for Megatron to divide by, nothing)."""
        terms, metrics = self.loss(outputs_of(fields, self.loss.needs), step.batch)
        total = fields.new_zeros(())
        found: dict[str, Tensor] = {}
        for term in terms:
            value = term.weight * term.sum / (self.counts[term.denominator] or 1.0)
            found[term.name] = value.detach()
            total = total + value
        self.parts.append((found, dict(metrics)))
        return total, torch.zeros((), dtype=torch.int, device=fields.device), {}


@dataclass(frozen=True)
class PassSettings:
    """How a run over micro-batches is made."""

    impl: str
    forward_only: bool
    whole_gradients: bool = False
    """All-reduce gradients also with the distributed optimizer, so that every rank has all of its own."""


LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]
Callback = Callable[[Pass, Tensor], LossResult]


def run(chunks: Sequence[Any], microbatches: Sequence[Batch], callback: Callback, context: ParallelContext, settings: PassSettings) -> None:
    """All micro-batches through the pipeline; gradients are left in DDP's buffers, reduced, divided by nothing."""
    layout, at = context.layout, context.coordinates
    passes = [prepare(b, layout.cp, at.cp, context.device, settings.impl) for b in microbatches]
    shape = microbatches[0].input_ids.shape
    if layout.pp > 1:
        assert all(b.input_ids.shape == shape for b in microbatches), "a pipeline needs micro-batches of one shape"

    def forward_step(data: Iterator[Pass], module: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
        step = next(data)
        return plain(module).run(module, step), lambda output: callback(step, output)

    config = plain(chunks[0]).config
    config.finalize_model_grads_func = _finalize(settings.whole_gradients, context)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(passes) for _ in chunks] if len(chunks) > 1 else iter(passes),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(passes),
        seq_length=shape[1],
        micro_batch_size=shape[0],
        forward_only=settings.forward_only,
    )


def _finalize(whole: bool, context: ParallelContext) -> Callable[..., None]:
    def finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        kwargs["force_all_reduce"] = whole
        finalize_model_grads(model, None, **kwargs)
        sum_partial_gradients(model, context.groups.expt_tp)

    return finalize


def plain(module: Any) -> SwiftGPT:
    """The model inside its wrappers."""
    while not isinstance(module, SwiftGPT):
        module = module.module
    return module


def _local_sums(objective: Objective) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(values that add up, largest, smallest) over this rank's micro-batches; means as two sums."""
    add: dict[str, float] = {}
    high: dict[str, float] = {}
    low: dict[str, float] = {}
    for terms, metrics in objective.parts:
        for name, value in terms.items():
            add[f"term/{name}"] = add.get(f"term/{name}", 0.0) + float(value)
        for name, metric in metrics.items():
            if isinstance(metric, Mean):
                add[f"sum/{name}"] = add.get(f"sum/{name}", 0.0) + float(metric.sum)
                add[f"count/{name}"] = add.get(f"count/{name}", 0.0) + float(metric.count)
            elif isinstance(metric, Sum):
                add[f"total/{name}"] = add.get(f"total/{name}", 0.0) + float(metric.value)
            elif isinstance(metric, Max):
                high[name] = max(high.get(name, -float("inf")), float(metric.value))
            elif isinstance(metric, Min):
                low[name] = min(low.get(name, float("inf")), float(metric.value))
    return add, high, low


def _reduce(values: dict[str, float], op: dist.ReduceOp.RedOpType, context: ParallelContext) -> dict[str, float]:
    if not values or context.layout.dp == 1:
        return values
    names = sorted(values)
    tensor = torch.tensor([values[n] for n in names], dtype=torch.float64, device=context.device)
    dist.all_reduce(tensor, op, context.groups.dp)
    return dict(zip(names, tensor.tolist(), strict=True))


def report(objective: Objective, context: ParallelContext) -> tuple[float, dict[str, float]]:
    """(objective, metrics) of the global batch, on every rank: reduced on the last stage, then told to the others."""
    layout, at = context.layout, context.coordinates
    result: list[Any] = [None]
    if at.pp == layout.pp - 1:
        add, high, low = _local_sums(objective)
        add = _reduce(add, dist.ReduceOp.SUM, context)
        high, low = _reduce(high, dist.ReduceOp.MAX, context), _reduce(low, dist.ReduceOp.MIN, context)
        result = [_finish(add, high, low)]
    if layout.pp > 1:
        dist.broadcast_object_list(result, group=context.groups.pp, group_src=layout.pp - 1, device=context.device)
    return result[0]


def _finish(add: dict[str, float], high: dict[str, float], low: dict[str, float]) -> tuple[float, dict[str, float]]:
    terms = {n.removeprefix("term/"): v for n, v in add.items() if n.startswith("term/")}
    metrics = {n.removeprefix("total/"): v for n, v in add.items() if n.startswith("total/")}
    for name, value in add.items():
        if name.startswith("sum/"):
            total = add["count/" + name.removeprefix("sum/")]
            metrics[name.removeprefix("sum/")] = value / total if total else 0.0
    metrics.update(high)
    metrics.update(low)
    if len(terms) > 1:
        metrics.update(terms)
    return sum(terms.values()), metrics
