"""Ranks that stream their weights to each kind of receivers, over groups that count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megaswift.engine.protocol import Receivers
from megaswift.parallel.layout import Layout
from megaswift.simulator.calls import Call
from tests.engine.streaming import ALL, start_counting, streamed
from tests.parity.cases import Case


@dataclass(frozen=True)
class Streams:
    """What the ranks stream."""

    case: Case
    folder: Path
    store: Path
    limit: int
    """Bytes of a bucket."""
    to: tuple[Receivers, ...] = ALL
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Streamed:
    """What one rank got, and what it sent, by receivers."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)
    """Of the tensors, in the order of the stream."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the tensors that are made of the same parameters."""
    most_held: int = 0
    """Bytes of all buffers when there were most."""


def stream(rank: int, world: int, job: Streams) -> Streamed:
    """Stream the weights of a folder; adapters have values that no other layout changes."""
    from tests.parity.measure import build

    trace = start_counting(rank, world, job.store, job.limit)
    held = _count_buffers()
    engine, _ = build(job.case, job.folder, world, **job.options)
    if engine.lora is not None:
        engine.lora.fill(lambda adapter, half: _drawn(adapter.name(half), adapter.shape(half)))
    out = Streamed()
    for group in engine.plan.groups:
        out.stages += [engine.weights.stage_of(group.entries[0])]
        out.sizes += [4 * sum(torch.Size(shape).numel() for shape in group.entries[0].hf_shapes)]
    for to in job.to:
        out.weights[to], out.calls[to] = streamed(engine, to, trace)
        out.order = out.order or [*out.weights[to]]
    out.most_held = held[0]
    dist.barrier()
    return out


def _count_buffers() -> list[int]:
    """Return a list that has the most bytes that live buffers have had."""
    from megaswift.engine.megatron.gather import _Exchange

    made: list[tuple[StorageWeakRef, int]] = []
    most = [0]
    allocate = _Exchange._flat

    def living() -> int:
        return sum(held for storage, held in made if not storage.expired())

    def allocated(self: _Exchange, size: int) -> Tensor:
        flat = allocate(self, size)
        made.append((StorageWeakRef(flat.untyped_storage()), size))
        end = time.monotonic() + 0.1
        while living() > most[0] and time.monotonic() < end:
            time.sleep(1e-3)  # gloo's thread lets go of a buffer shortly after the wait for it has ended
        most[0] = max(most[0], living())
        return flat

    _Exchange._flat = allocated  # type: ignore[method-assign]
    return most


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator)


def receivers(layout: Layout, to: Receivers) -> set[int]:
    """Return the ranks that get tensors, by their coordinates."""
    if to == "rank0":
        return {0}
    if to == "all":
        return set(range(layout.world_size))
    return {layout.rank(dp=replica) for replica in range(layout.dp)}
