"""Stacked, transposed and interleaved Hugging Face tensors: read and written by hand-worked numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megaswift.bridge.plan import EntriesOfSameHfTensors, PlanEntry
from megaswift.families import ModelSpec, family_of
from megaswift.models.published.table import QWEN3_30B_A3B
from megaswift.models.weights.rules import Shard, SliceMap, TensorParallelShard

E, H, F = 3, 4, 6
"""Experts, hidden size, inner width."""


@dataclass(frozen=True)
class Interleaved:
    """All experts in one tensor [E, H, 2 F] whose columns are gate, up, gate, up, ..."""

    megatron: str = "experts.{E}.fc1"
    hf: tuple[str, ...] = ("gate_up",)
    scope: Any = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """One tensor."""
        return [(E, H, 2 * F)]

    def pieces(self, spec: ModelSpec, cut: TensorParallelShard) -> list[SliceMap]:
        """This rank's gates, then its ups."""
        assert cut.expert is not None
        n = F // cut.tp
        first, stop = 2 * n * cut.rank, 2 * n * (cut.rank + 1)
        return [SliceMap(0, first + part, stop - 1 + part, 2, (cut.expert,), True) for part in (0, 1)]


class Source:
    """One tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def slice(self, _: str, where: Any) -> Tensor:
        """A part of it."""
        return self.tensor[where]

    def dtype(self, _: str) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype


def test_stacked_transposed_interleaved() -> None:
    spec = family_of(QWEN3_30B_A3B).spec(QWEN3_30B_A3B)
    stored = torch.arange(E * H * 2 * F, dtype=torch.float32).view(E, H, 2 * F)
    entries = tuple(PlanEntry(Interleaved(), spec, None, e) for e in range(E))
    shards = [[entry.read(Source(stored), 2, rank) for rank in (0, 1)] for entry in entries]
    assert entries[0].shard_shape(2) == (F, H) and entries[0].full_shape() == (2 * F, H)
    second = shards[1][1]  # expert 1, rank 1: gates 3, 4, 5 are columns 6, 8, 10, its ups columns 7, 9, 11
    assert torch.equal(second, stored[1][:, [6, 8, 10, 7, 9, 11]].t())
    assert torch.equal(EntriesOfSameHfTensors(entries).write(shards)["gate_up"], stored)
