"""Starts ranks that stream their weights over groups that count, in buckets of a size that a test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megaswift.engine.protocol import Receivers
from megaswift.simulator.calls import Call, Trace
from megaswift.simulator.groups import register, use_torch_collectives
from megaswift.simulator.rank import start_group
from tests.rank_recorder.counted_gloo_group import CountedGlooGroup

ALL: tuple[Receivers, ...] = ("rank0", "replicas", "all")


def start_counting(rank: int, world: int, store: Path, limit: int) -> Trace:
    """Start the rank's groups, with buckets of `limit` bytes, and return the record of their messages."""
    from megaswift.engine import buckets

    trace = Trace(rank)
    register(trace, range(world), CountedGlooGroup)  # type: ignore[arg-type]
    use_torch_collectives()
    start_group(rank, world, dist.FileStore(str(store), -1))
    buckets.HOST_BUCKET = limit
    return trace


def streamed(engine: Any, to: Receivers, trace: Trace) -> tuple[dict[str, Tensor], list[Call]]:
    """Return copies of the weights that this rank gets, in their order, and what it sent meanwhile."""
    before = len(trace.calls)
    weights = {name: tensor.clone() for name, tensor in engine.hf_weights(to=to)}
    return weights, trace.calls[before:]
