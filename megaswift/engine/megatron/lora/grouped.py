"""Adapters on Transformer Engine's grouped experts: those of all local experts in two grouped products.

One expert after the other would be two small products each, 256 a layer for 128 experts. Here A's of all experts are one
grouped product and B's another; where experts join several Hugging Face modules (gate and up), B's are blocks of one
matrix. Names, numbers and checkpoints of the adapters are as without grouping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaswift.bridge.adapters import Adapter, output_order
from megaswift.engine.megatron.lora.layers import CHILD, LayerAdapters
from megaswift.engine.megatron.parallel_context import ParallelContext


class GroupedAdapters(LayerAdapters):
    """The adapters of one grouped linear layer of this rank, experts in order, each with the same modules."""

    def __init__(
        self, experts: Sequence[Sequence[Adapter]], context: ParallelContext, dtype: torch.dtype, dropout: float
    ) -> None:
        super().__init__([a for expert in experts for a in expert], context, dtype, dropout)
        assert not self.dora, "DoRA needs each expert's weight: rules refuse it with a grouped GEMM"
        self.experts, self.each = len(experts), len(experts[0])
        self.order = output_order(experts[0], self.ranks, self.rank)

    def forward(self, x: Tensor, out: Tensor, splits: Any) -> Tensor:  # type: ignore[override]
        """The output [t, out] with the adapters' part of x [t, in]; `splits`: tokens of each expert."""
        if not self.enabled or x.shape[0] == 0:
            return out
        counts = torch.as_tensor(splits, device=x.device)
        ends = counts.cumsum(0).to(torch.int32)
        h = F.grouped_mm(self._dropped(x), self._stacked_a(), offs=ends)
        return out + F.grouped_mm(h, self._stacked_b(), offs=ends)

    def _stacked_a(self) -> Tensor:
        """[experts, in, sum of ranks]."""
        matrices = self.matrices("A")
        rows = [torch.cat(matrices[e * self.each : (e + 1) * self.each]) for e in range(self.experts)]
        return torch.stack(rows).transpose(1, 2)

    def _stacked_b(self) -> Tensor:
        """[experts, sum of ranks, out], scaled; 0 between one module's A and another's outputs."""
        ranks = [a.shape[0] for a in self.matrices("A")[: self.each]]
        starts = [sum(ranks[:n]) for n in range(self.each)]
        total, experts = sum(ranks), []
        for e in range(self.experts):
            blocks = []
            for number, first, rows in self._runs():
                if number is None:
                    blocks.append(self.matrix(0, "B").new_zeros(rows, total))
                    continue
                at = e * self.each + number
                part = self.matrix(at, "B")[first : first + rows] * self.adapters[at].scale
                blocks.append(F.pad(part, (starts[number], total - starts[number] - ranks[number])))
            experts.append(torch.cat(blocks))
        return torch.stack(experts).transpose(1, 2)


def add_grouped_adapters(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a grouped layer called with (x [t, in], tokens of each expert): (output, bias) with the adapters'
    part added."""
    adapters: GroupedAdapters = getattr(layer, CHILD)
    out, *rest = output
    return adapters(args[0], out, args[1]), *rest


def attach_grouped_adapters(layer: nn.Module, adapters: GroupedAdapters) -> None:
    """Put adapters on a grouped layer."""
    layer.add_module(CHILD, adapters)
    layer.register_forward_hook(add_grouped_adapters)
