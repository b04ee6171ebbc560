"""Adapters on Transformer Engine's grouped experts: those of all local experts in two grouped products.

One expert after the other would be two small products each, 256 a layer for 128 experts. Here A's of all experts are
one grouped product and B's another; where experts join several Hugging Face modules (gate and up), B's are blocks of
one matrix. Names, numbers and checkpoints of the adapters are as without grouping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaswift.bridge.adapter_plan import ModuleAdapterSpec, rank_output_rows_by_adapter
from megaswift.device_copy import copy_to_device_async
from megaswift.engine.megatron.lora.layer_adapters import CHILD, LayerAdapters
from megaswift.engine.megatron.parallel_context import ParallelContext

GROUPED_ROW_BYTES = 16
"""What rows of a grouped product's operands are a multiple of (torch: "strides should be multiple of 16 bytes"); ranks
are filled up with zeros."""


class GroupedAdapters(LayerAdapters):
    """The adapters of one grouped linear layer of this rank: of each local expert, in order, those of its modules, or
    none."""

    def __init__(
        self,
        experts: Sequence[Sequence[ModuleAdapterSpec]],
        context: ParallelContext,
        dtype: torch.dtype,
        dropout: float,
    ) -> None:
        super().__init__([a for expert in experts for a in expert], context, dtype, dropout)
        assert not self.dora, "DoRA needs each expert's weight: rules refuse it with a grouped GEMM"
        self.runs: list[list[tuple[int | None, int]]] = []
        """Of each expert (number of the adapter on this rank, or None; rows) along its outputs."""
        self.numbers: list[range] = []
        """Of each expert its adapters' numbers on this rank."""
        first = 0
        for expert in experts:
            own = rank_output_rows_by_adapter(expert, self.ranks, self.rank) if expert else []
            self.runs.append([(None if number is None else first + number, rows) for number, rows in own])
            self.numbers.append(range(first, first + len(expert)))
            first += len(expert)
        widest = max(sum(self.adapters[n].rank for n in numbers) for numbers in self.numbers)
        unit = GROUPED_ROW_BYTES // dtype.itemsize
        self.width = -(-widest // unit) * unit

    def forward(self, x: Tensor, out: Tensor, splits: Any) -> Tensor:  # type: ignore[override]
        """The output [t, out] with the adapters' part of x [t, in]; `splits`: tokens of each expert."""
        if not self.enabled:
            return out
        if x.shape[0] == 0:  # no token for this rank's experts: gradients of 0, for which Megatron's reductions wait
            return out + torch.stack([p.sum() for p in self.parameters()]).sum().to(out.dtype)
        counts = copy_to_device_async(torch.as_tensor(splits), x.device)
        ends = counts.cumsum(0).to(torch.int32)
        h = F.grouped_mm(self._dropped(x), self._stacked_a(), offs=ends)
        return out + F.grouped_mm(h, self._stacked_b(), offs=ends)

    def _stacked_a(self) -> Tensor:
        """[experts, in, sum of ranks]."""
        some = self.matrix(0, "A")
        rows = []
        for numbers in self.numbers:
            own = [self.matrix(n, "A") for n in numbers]
            missing = self.width - sum(a.shape[0] for a in own)
            rows.append(torch.cat([*own, some.new_zeros(missing, some.shape[1])]))
        return torch.stack(rows).transpose(1, 2)

    def _stacked_b(self) -> Tensor:
        """[experts, sum of ranks, out], scaled; 0 between one module's A and another's outputs."""
        outputs = next(sum(rows for _, rows in runs) for runs in self.runs if runs)
        some, experts = self.matrix(0, "B"), []
        for runs in self.runs:
            used, blocks = [0] * len(self.adapters), []
            for number, rows in runs or [(None, outputs)]:
                if number is None:
                    blocks.append(some.new_zeros(rows, self.width))
                    continue
                part = self.matrix(number, "B")[used[number] : used[number] + rows] * self.adapters[number].scale
                before = sum(self.adapters[n].rank for n in self._earlier(number))
                blocks.append(F.pad(part, (before, self.width - before - part.shape[1])))
                used[number] += rows
            experts.append(torch.cat(blocks))
        return torch.stack(experts).transpose(1, 2)

    def _earlier(self, number: int) -> range:
        """The adapters of the same expert before this one."""
        return next(range(numbers.start, number) for numbers in self.numbers if number in numbers)


def grouped_adapters_forward_hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a grouped layer called with (x [t, in], tokens of each expert): (output, bias) with the adapters'
    part added."""
    adapters: GroupedAdapters = getattr(layer, CHILD)
    out, *rest = output
    return adapters(args[0], out, args[1]), *rest


def attach_grouped_adapters_to_layer(layer: nn.Module, adapters: GroupedAdapters) -> None:
    """Put adapters on a grouped layer."""
    layer.add_module(CHILD, adapters)
    layer.register_forward_hook(grouped_adapters_forward_hook)
