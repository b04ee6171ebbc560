"""Experts that Hugging Face keeps in one tensor a layer, [in, out] by expert, gate and up in alternating columns
(gpt_oss).

Owns the rules that cut one expert out of it and turn it round; `rules.py` has those of experts with tensors of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import Scope, Shard, SliceMap, TensorParallelShard, shard_range


def _expert(shard: TensorParallelShard) -> tuple[int]:
    assert shard.expert is not None, "a rule about one expert"
    return (shard.expert,)


@dataclass(frozen=True)
class InterleavedGateUp:
    """Gate and up of every expert, [E, h, 2 f] with columns gate, up, gate, up, ...: on each rank [its gates; its ups],
    [2 f / tp, h].

    `matrix` False is for the biases [E, 2 f].
    """

    megatron: str
    hf: tuple[str]
    matrix: bool = True
    scope: Scope = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[E, h, 2 f], or [E, 2 f]."""
        return [(spec.experts, *((spec.hidden_size,) if self.matrix else ()), 2 * spec.expert_ffn)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """Every second column, twice."""
        first, stop = shard_range(spec.expert_ffn, shard, "expert_ffn")
        return [SliceMap(0, 2 * first + part, 2 * stop - 1 + part, 2, _expert(shard), self.matrix) for part in (0, 1)]


@dataclass(frozen=True)
class StackedDown:
    """The second matrix of every expert, [E, f, h]: [h, f / tp], cut along the inner width."""

    megatron: str
    hf: tuple[str]
    scope: Scope = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "row"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[E, f, h]."""
        return [(spec.experts, spec.expert_ffn, spec.hidden_size)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """A range of the inner width."""
        return [SliceMap(0, *shard_range(spec.expert_ffn, shard, "expert_ffn"), 1, _expert(shard), True)]


@dataclass(frozen=True)
class StackedReplicatedRule:
    """A vector of every expert, [E, h]: [h] on every rank."""

    megatron: str
    hf: tuple[str]
    scope: Scope = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "replicated"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[E, h]."""
        return [(spec.experts, spec.hidden_size)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """All of one expert's."""
        return [SliceMap(0, 0, spec.hidden_size, 1, _expert(shard))]
