"""The rank side of what LoRA's tests ask beside loss and gradients: sizes, and adapters off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaswift.engine.protocol import EngineSizeReport
from megaswift.losses.contract import RequestedModelOutputs
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import Case, global_batch, own
from tests.parity.measure import Task, build, full


@dataclass(frozen=True)
class Adapted:
    """Facts of one rank. Elements in Megatron's gradient buffers, and in this rank's adapters; sums of
    log-probabilities."""

    report: EngineSizeReport
    trained: int
    expected: int
    whole: int
    adapted: float
    reference: float
    again: float
    merged: dict[str, Tensor]
    """Of rank 0: `hf_weights`."""


def _total(engine: Any, case: Case, dp: int) -> float:
    """Sum of the log-probabilities of this rank's micro-batches."""
    outputs = engine.score(own(global_batch(case, 2), case.dp, dp), RequestedModelOutputs())
    return sum(float(o.logprobs.double().sum()) for o in outputs)


def plain(rank: int, world: int, task: Task) -> tuple[EngineSizeReport, float]:
    """Report and log-probabilities of an engine without adapters."""
    engine, context = build(task.case, task.folder, world)
    found = engine.report(), _total(engine, task.case, context.layout.coordinates(rank).dp)
    torch.distributed.barrier()
    context.close()
    return found


def adapted(rank: int, world: int, task: Task) -> Adapted:
    """An engine with adapters, its numbers with them on and off."""
    engine, context = build(task.case, task.folder, world, **task.options)
    dp = context.layout.coordinates(rank).dp
    on = _total(engine, task.case, dp)
    with engine.reference():
        off = _total(engine, task.case, dp)
    again = _total(engine, task.case, dp)
    buffers = [b for c in engine.chunks for b in c.buffers + c.expert_parallel_buffers]
    trained = sum(math.prod(p.shape) for b in buffers for p in b.params)
    expected = sum(p.tensor.numel() for p in engine.lora.placed)
    found = Adapted(
        engine.report(), trained, expected, engine.lora.plan.parameters, on, off, again, full(engine.hf_weights())
    )
    torch.distributed.barrier()
    context.close()
    return found


def fresh(rank: int, world: int, task: Task) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """New adapters: loss of evaluation, the adapters, and the weights with them merged in."""
    engine, context = build(task.case, task.folder, world, **task.options)
    mine = own(global_batch(task.case, 0), task.case.dp, context.layout.coordinates(rank).dp)
    found = engine.evaluate(mine, CrossEntropy()).loss, full(engine.adapter_weights()), full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return found


def dropped(rank: int, world: int, task: Task) -> tuple[float, float, bool]:
    """Loss of evaluation and of training with dropout, and whether tensor-parallel ranks agree on what they all hold
    after a step."""
    engine, context = build(task.case, task.folder, world, **task.options)
    mine = own(global_batch(task.case, 0), task.case.dp, context.layout.coordinates(rank).dp)
    quiet = engine.evaluate(mine, CrossEntropy()).loss
    loss = engine.train_batch(mine, CrossEntropy(), 1e-3).loss
    alike = True
    for p in engine.lora.placed:
        if not p.adapter.sharded(p.half) and p.owner.ranks > 1:
            copies = [torch.empty_like(p.tensor.data) for _ in range(p.owner.ranks)]
            torch.distributed.all_gather(copies, p.tensor.data.contiguous(), group=p.owner.group)
            alike = alike and all(torch.equal(copies[0], c) for c in copies)
    torch.distributed.barrier()
    context.close()
    return quiet, loss, alike


@dataclass(frozen=True)
class Held:
    """Weights in a rank's memory: in decoder layers' projections, and all others; the engine's report."""

    linear: int
    linear_bytes: int
    other_bytes: int
    report: int


def held(rank: int, world: int, task: Task) -> Held:
    """Counted over the modules' own tensors."""
    engine, context = build(task.case, task.folder, world, **task.options)
    tensors = [(name, t) for c in engine.plain for name, t in [*c.named_parameters(), *c.named_buffers()]]
    linear = [(n, t) for n, t in tensors if "linear_" in n and ".weight" in n and ".lora." not in n and "norm" not in n]
    other = [t for n, t in tensors if n not in {m for m, _ in linear} and isinstance(t, torch.nn.Parameter)]
    sizes = [t.numel() * (2 if t.dtype == torch.uint8 else 1) for n, t in linear if not n.endswith("absmax")]
    found = Held(
        sum(sizes), sum(t.nbytes for _, t in linear), sum(t.nbytes for t in other), engine.report().weight_bytes
    )
    torch.distributed.barrier()
    context.close()
    return found
