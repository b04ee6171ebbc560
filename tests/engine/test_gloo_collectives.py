"""Collectives in one exchange against sums and joins worked out from every rank's tensors, even and uneven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.pool import Pool

WORLD = 3
BIG = 70_001
"""More than what is sent to everyone, and no multiple of the ranks."""


def of(rank: int, *shape: int) -> torch.Tensor:
    """The tensor that a rank sends."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).float()


def everything(rank: int, world: int, _: Any) -> dict[str, torch.Tensor]:
    """Each collective once (on the ranks)."""
    import megaswift.engine.megatron  # noqa: F401 (puts the collectives in place)

    dist.init_process_group("gloo")
    found: dict[str, torch.Tensor] = {}
    for name, size in (("small", 5), ("big", BIG)):
        for op in ("SUM", "MAX", "MIN"):
            tensor = of(rank, size, 2)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            found[f"{name} {op}"] = tensor
    parts = [torch.zeros(r + 1, 4) for r in range(world)]
    dist.all_gather(parts, of(rank, rank + 1, 4))
    found["uneven gather"] = torch.cat(parts)
    whole = torch.zeros(world * 2, 4)
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=of(rank, 2, 4))
    found["gather"] = whole
    mine = torch.zeros(rank + 1, 4)
    dist.reduce_scatter(mine, list(of(rank, 6, 4).split([r + 1 for r in range(world)])))
    found["uneven scatter"] = mine
    buffer = of(rank, world * 2, 4)
    mine = buffer[rank * 2:rank * 2 + 2]
    handle = dist.reduce_scatter_tensor(mine, buffer, async_op=True)
    handle.wait()
    found["scatter in place"] = mine.clone()
    dist.barrier()
    return found


@pytest.mark.process
def test_equal_what_the_ranks_sent(pool: Pool) -> None:
    found = pool.run("tests.engine.test_gloo_collectives:everything", None, WORLD)
    for rank, seen in enumerate(found):
        for name, size in (("small", 5), ("big", BIG)):
            sent = torch.stack([of(r, size, 2) for r in range(WORLD)])
            for op, want in (("SUM", sent.sum(0)), ("MAX", sent.amax(0)), ("MIN", sent.amin(0))):
                assert torch.equal(seen[f"{name} {op}"], want), (rank, name, op)
        assert torch.equal(seen["uneven gather"], torch.cat([of(r, r + 1, 4) for r in range(WORLD)]))
        assert torch.equal(seen["gather"], torch.cat([of(r, 2, 4) for r in range(WORLD)]))
        total = sum(of(r, 6, 4) for r in range(WORLD))
        assert torch.equal(seen["uneven scatter"], total.split([1, 2, 3])[rank])
        assert torch.equal(seen["scatter in place"], total.split(2)[rank])
