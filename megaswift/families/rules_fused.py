"""Rule of few families: projections that Hugging Face keeps below one another in a single tensor.

`rules` has those that most families use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from megaswift.families.rules import Rule, Scope, Shard, ShardSpec, SliceMap
from megaswift.families.spec import ModelSpec


@dataclass(frozen=True)
class Fused:
    """`parts` with its HF tensors joined by rows, in their order, into the one called `name`."""

    parts: Rule
    name: str
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    @property
    def megatron(self) -> str:
        """Megatron's name."""
        return self.parts.megatron

    @property
    def hf(self) -> tuple[str]:
        """The one tensor."""
        return (self.name,)

    @property
    def scope(self) -> Scope:
        """That of the parts."""
        return self.parts.scope

    @property
    def when(self) -> str:
        """That of the parts."""
        return self.parts.when

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[rows of all parts, ...]."""
        shapes = self.parts.shapes(spec)
        return [(sum(s[0] for s in shapes), *shapes[0][1:])]

    def pieces(self, spec: ModelSpec, shard: ShardSpec) -> list[SliceMap]:
        """Those of the parts, as rows of the one tensor."""
        first = [0, *accumulate(s[0] for s in self.parts.shapes(spec))]
        return [
            replace(p, source=0, start=first[p.source] + p.start, stop=first[p.source] + p.stop)
            for p in self.parts.pieces(spec, shard)
        ]
