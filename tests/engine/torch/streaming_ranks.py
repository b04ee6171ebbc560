"""Ranks of torch engines that stream their weights to each kind of receivers, over groups that count."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megaswift.losses.sft import CrossEntropy
from megaswift.simulator.calls import Call
from tests.engine.streaming import ALL, start_counting, streamed
from tests.parity.cases import Case, global_batch, own
from tests.parity.measure import recipe_options
from tests.parity.oracle import Recipe


@dataclass(frozen=True)
class Streams:
    """What the ranks stream."""

    case: Case
    folder: Path
    store: Path
    limit: int
    """Bytes of a bucket."""
    options: dict[str, Any]


@dataclass
class Streamed:
    """What one rank got, and what it sent, by receivers."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    alone: dict[str, Tensor] = field(default_factory=dict)
    """Each parameter by its name in the engine, gathered alone by torch or DeepSpeed."""
    adapter: int = 0
    """Messages of a folder of adapters."""


def stream(rank: int, world: int, job: Streams) -> Streamed:
    """Take a step, so that weights and their float32 copies in the optimizer differ, and stream."""
    trace = start_counting(rank, world, job.store, job.limit)
    engine = opened(job, world)
    engine.train_batch(own(global_batch(job.case, 2), world, rank), CrossEntropy(), 1e-3)
    out = Streamed()
    for to in ALL:
        out.weights[to], out.calls[to] = streamed(engine, to, trace)
    out.alone = {name: gathered_alone(engine, name, p) for name, p in engine.fields.named_parameters()}
    if engine.adapts:
        before = len(trace.calls)
        engine.write_adapter(job.store.with_suffix(".adapter"), "base")
        out.adapter = len(trace.calls) - before
    dist.barrier()
    return out


def opened(job: Streams, world: int) -> Any:
    """Return the engine of a policy with the folder's weights."""
    from megaswift.config import SwiftConfig
    from megaswift.models.any_model import spec_from_family_or_size_fields
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    options = job.case.config(**recipe_options(Recipe(), False)) | job.options
    cfg = SwiftConfig(task="grpo", reward_funcs=("format",), model=str(job.folder), **options)
    context = start_context(cfg.replace(ddp_timeout=600, seed=11), Layout.from_config(cfg.parallel, world))
    engine = make_engine(cfg, spec_from_family_or_size_fields(job.folder), job.folder, context)
    engine.load_hf(job.folder)
    return engine


def gathered_alone(engine: Any, name: str, parameter: Any) -> Tensor:
    """Return a parameter as its library gathers it, in float32."""
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    if engine.kind == "ddp":
        return parameter.detach().clone()
    import deepspeed

    if parameter.requires_grad:
        return deepspeed.utils.safe_get_full_fp32_param(parameter).detach().clone()
    if engine.kind != "zero3":
        return parameter.detach().float().clone()
    with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().float().clone()
