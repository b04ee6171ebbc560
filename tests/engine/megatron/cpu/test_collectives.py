"""Collectives in one exchange against sums and joins worked out from every rank's tensors, even and uneven, by memory
and by gloo.

Covers: megaswift/engine/megatron/cpu/shared_memory.py.
"""

from __future__ import annotations

import os
from datetime import timedelta

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


def everything(rank: int, world: int, slot: int) -> dict[str, torch.Tensor]:
    """Each collective once (on the ranks), in shared memory with slots of so many bytes; 0: by gloo alone."""
    from megaswift.engine.megatron.cpu import collectives, shared_memory

    shared_memory.SLOT = slot or shared_memory.SLOT
    if not slot:
        shared_memory.machine_and_pid_namespace_id = lambda: 0
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
    mine = buffer[rank * 2 : rank * 2 + 2]
    handle = dist.reduce_scatter_tensor(mine, buffer, async_op=True)
    handle.wait()
    found["scatter in place"] = mine.clone()
    rows = [[(r + to) % 3 for to in range(world)] for r in range(world)]  # from r; some send nothing
    mine, takes = of(rank, sum(rows[rank]), 2), [rows[r][rank] for r in range(world)]
    swapped = torch.zeros(sum(takes), 2)
    dist.all_to_all_single(swapped, mine, torch.tensor(takes), torch.tensor(rows[rank]))
    found["uneven swap"] = swapped
    swapped = torch.zeros(world * 2, dtype=torch.int64)
    dist.all_to_all_single(swapped, of(rank, world * 2).long())
    found["swap"] = swapped
    for i in range(50):  # slots are used again and again, and nobody reads what belongs to another turn
        tensor = of(rank + world * i, 7)
        dist.all_reduce(tensor)
        found[f"turn {i}"] = tensor
    assert (collectives._exchange(None) is None) == (not slot)
    dist.barrier()
    return found


@pytest.mark.process
@pytest.mark.parametrize("slot", [1 << 22, 128, 0], ids=["shared", "most beyond a slot", "gloo"])
def test_equal_what_the_ranks_sent(slot: int, pool: Pool) -> None:
    found = pool.run("tests.engine.megatron.cpu.test_collectives:everything", slot, WORLD)
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
        rows = [
            of(r, sum((r + to) % 3 for to in range(WORLD)), 2).split([(r + to) % 3 for to in range(WORLD)])
            for r in range(WORLD)
        ]
        assert torch.equal(seen["uneven swap"], torch.cat([parts[rank] for parts in rows]))
        assert torch.equal(
            seen["swap"], torch.cat([of(r, WORLD * 2).long()[rank * 2 : rank * 2 + 2] for r in range(WORLD)])
        )
        for i in range(50):
            assert torch.equal(seen[f"turn {i}"], sum(of(r + WORLD * i, 7) for r in range(WORLD)))


def left_alone(rank: int, world: int, ends: bool) -> str:
    """What rank 0 is told when the other ends, or is late, before a collective (on the ranks)."""
    from megaswift.engine.megatron.cpu import shared_memory

    shared_memory.LOOK = 0.05
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    store = dist.distributed_c10d._get_default_store()
    dist.monitored_barrier()
    if not ends:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        if not ends:
            store.wait(["reported"])
            store.set("read", "")
        return str(os.getpid())
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        if not ends:  # rank 0 holds the store
            store.set("reported", "")
            store.wait(["read"])
        return str(error)
    return "nothing"


@pytest.mark.process
def test_a_rank_that_ends_or_is_late_is_named(pool: Pool) -> None:
    told, other = pool.run("tests.engine.megatron.cpu.test_collectives:left_alone", True, 2, timeout=240)
    assert told == f"rank 1 of a group of 2 has ended (process {other})"
    told = pool.run("tests.engine.megatron.cpu.test_collectives:left_alone", False, 2, timeout=240)[0]
    assert told == "timed out after 2 s waiting for rank 1 of a group of 2 (--ddp_timeout)"
