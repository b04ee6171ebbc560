"""Checksums see a flipped bit and exchanged values; replicas are compared over a real group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaswift.engine.diagnostics.replica_checksums import (
    ReplicaDifference,
    ReplicatedWeights,
    replica_differences,
    replicated_by_group,
    tensor_checksums,
)
from tests.rank_context import run_ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 3, 7, 4099])
def test_every_flipped_bit_shows(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(dtype)
    sums = tensor_checksums(values).tolist()
    raw = values.view(torch.uint8)
    for byte in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert tensor_checksums(values).tolist() != sums, (byte, bit)
            raw[byte] ^= 1 << bit
    assert tensor_checksums(values).tolist() == sums


def test_exchanged_values_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.engine.diagnostics.replica_checksums.CHUNK", 8)
    values = torch.arange(40, dtype=torch.float32)
    exchanged = values.clone()
    exchanged[[3, 30]] = values[[30, 3]]
    assert tensor_checksums(exchanged)[0] == tensor_checksums(values)[0]
    assert tensor_checksums(exchanged)[1] != tensor_checksums(values)[1]
    words = values.view(torch.int32).long()
    assert tensor_checksums(values).tolist() == [int(words.sum()), int((words * torch.arange(1, 41)).sum())]


def test_experts_have_a_group_of_their_own() -> None:
    dense, expert = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    expert.allreduce = False  # type: ignore[attr-defined]
    found = replicated_by_group([("a", dense), ("b", expert)], "all", "expert replicas")
    assert [(one.group, list(one.names)) for one in found] == [("all", ["a"]), ("expert replicas", ["b"])]


def _rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, 4, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same, other, mine = torch.ones(5), torch.ones(3), torch.full((2,), float(rank // 2))
    if rank == 2:
        other[1] = torch.nextafter(other[1], torch.tensor(2.0))
    parts = [
        ReplicatedWeights(dist.group.WORLD, ["same", "other"], [same, other]),
        ReplicatedWeights(pairs[rank // 2], ["mine"], [mine]),
    ]
    (folder / str(rank)).write_text(repr(replica_differences(parts)))
    dist.barrier()
    os._exit(0)


@pytest.mark.process
def test_the_odd_rank_is_found(tmp_path: Path) -> None:
    run_ranks(_rank, 4, tmp_path)
    expected = repr([ReplicaDifference("other", (2,), (0, 1, 3))])
    assert [(tmp_path / str(r)).read_text() for r in range(4)] == [expected] * 4
