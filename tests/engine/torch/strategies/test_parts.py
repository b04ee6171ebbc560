"""Whole tensors from the parts of ranks, on real ranks: uneven shapes, several dtypes, replicas.

Covers: megaswift/engine/torch/strategies/parts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parity.pool import Pool

pytestmark = pytest.mark.process

SHAPES = ((7, 3), (1,), (4, 2, 5), (2,), (12, 1), (9,), ())
"""On 3 ranks: a shorter last part, two empty ones, even parts; a number."""


def drawn() -> list[Tensor]:
    """Return the whole tensors."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [t.bfloat16() if i % 2 else t for i, t in enumerate(tensors)]


def gathered(rank: int, world: int, replicas: int) -> Any:
    """Return what a rank gets, by receivers, of a model in `replicas` copies."""
    from torch.distributed.device_mesh import init_device_mesh

    from megaswift.engine.torch.strategies.parts import Part, joined

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("shard")
    parts = []
    for tensor in drawn():
        cut = tensor.reshape(tensor.shape or 1)
        rows = -(-len(cut) // group.size())
        own = cut[rows * group.rank() : rows * (group.rank() + 1)]
        parts.append(Part(own.flatten(), rows * cut[0].numel(), tensor.shape))
    cpu = torch.device("cpu")
    found: dict[str, list[Tensor]] = {}
    for to in ("rank0", "replicas", "all"):
        found[to] = []
        for tensor in joined(parts, group, cpu, to):
            assert tensor.stride() == torch.empty(tensor.shape).stride(), "an element alone is viewed as bytes too"
            found[to].append(tensor.clone())
    dist.barrier()
    return found


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2), (1, 1)])
def test_receivers_get_whole_tensors(world: int, replicas: int, pool: Pool) -> None:
    """Other ranks get none."""
    for rank, found in enumerate(pool.run(f"{__name__}:gathered", replicas, world)):
        for to, tensors in found.items():
            wanted = drawn() if to != "rank0" or rank == 0 else []
            assert len(tensors) == len(wanted), to
            assert all(t.dtype == w.dtype and torch.equal(t, w) for t, w in zip(tensors, wanted, strict=True)), to
