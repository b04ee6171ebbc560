"""A parameter of this rank and its entry in the weight plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megaswift.bridge.plan import PlanEntry
from megaswift.engine.megatron.layers.nf4_linear import NF4Matrix
from megaswift.engine.megatron.parallel_context import ParallelContext


@dataclass(frozen=True)
class LocalParam:
    """A parameter, buffer or quantized matrix of this rank and its entry in the weight plan."""

    entry: PlanEntry
    owner: nn.Module
    name: str
    """The owner's attribute: looked up at each use, because a change of precision replaces buffers."""

    @property
    def held(self) -> Tensor | NF4Matrix:
        """The parameter or buffer, or what stands for it."""
        return getattr(self.owner, self.name)

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer; of a quantized matrix its values, a copy."""
        value = self.held
        return value.dequantized() if isinstance(value, NF4Matrix) else value


def splitting_ranks(entry: PlanEntry, context: ParallelContext) -> tuple[int, int]:
    """(ranks, rank) that split this entry: ETP for experts, TP otherwise."""
    layout = context.layout
    coords = context.coordinates
    return (layout.etp, coords.etp) if entry.expert is not None else (layout.tp, coords.tp)
