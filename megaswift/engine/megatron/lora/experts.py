"""Adapters on grouped experts: those of all local experts are one A [experts, r, in] and one B [experts, out, r] for
each projection, which grouped products read as they lie.

One expert after the other would be two small products each, 256 a layer for 128 experts. With 128 experts whose gate
and up projections are one layer, the adapters of an MLP launch 12 kernels forward and 31 backward (counted by the
tests). Names and numbers of the adapters, also on disk, are as without grouping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaswift.bridge.adapters.plan import Half, ModuleAdapterSpec, rank_output_rows_by_adapter
from megaswift.device_copy import copy_to_device_async
from megaswift.engine.megatron.layers.moe.products import ExpertRows, grouped_linear
from megaswift.engine.megatron.lora.layers import CHILD, Adapters
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.models.grouped_experts import ROW_BYTES


@dataclass(frozen=True, order=True)
class _Stack:
    """Adapters of several experts that share an A and a B: of one projection, alike in rank and scale."""

    column: int
    """Where the projection's outputs begin among the layer's."""
    outputs: int
    rank: int
    scale: float


class GroupedAdapters(Adapters):
    """The adapters of one grouped linear layer of this rank.

    A projection has one stack, which all experts are in, unless a folder's adapters leave some experts out or differ in
    rank or alpha from expert to expert.
    """

    def __init__(
        self,
        experts: Sequence[Sequence[ModuleAdapterSpec]],
        context: ParallelContext,
        dtype: torch.dtype,
        dropout: float,
    ) -> None:
        """`experts`: of each local expert, in order, the adapters of its modules, or none."""
        super().__init__([a for expert in experts for a in expert], context, dropout)
        assert not self.dora, "DoRA needs each expert's weight: rules refuse it with a grouped GEMM"
        self.experts = len(experts)
        members: dict[_Stack, list[tuple[int, int]]] = {}  # (expert, number of its adapter)
        number = 0
        for i, expert in enumerate(experts):
            for stack in self._stacks_of(expert):
                members.setdefault(stack, []).append((i, number))
                number += 1
        self.stacks = sorted(members)
        self.places: dict[int, tuple[int, int]] = {}
        """Number of an adapter -> (number of its stack, place in it)."""
        self.chosen: list[Tensor | None] = []
        """For each stack, the experts that are in it [experts]; None: all."""
        for n, stack in enumerate(self.stacks):
            inside = members[stack]
            self.places |= {number: (n, place) for place, (_, number) in enumerate(inside)}
            numbers = torch.tensor([i for i, _ in inside], device=context.device)
            self.chosen.append(None if len(inside) == self.experts else numbers)
            first = self.adapters[inside[0][1]]
            for half in first.halves:
                shape = (len(inside), *first.local_shape(half, self.ranks, self.rank))
                data = torch.empty(shape, dtype=dtype, device=context.device)
                self.register_parameter(f"{half}{n}", self._new_parameter(first, half, data))

    def _stacks_of(self, expert: Sequence[ModuleAdapterSpec]) -> list[_Stack]:
        """Returns the stacks that hold one expert's adapters."""
        columns: dict[int, int] = {}
        column = 0
        for number, rows in rank_output_rows_by_adapter(expert, self.ranks, self.rank) if expert else ():
            if number is not None:
                columns.setdefault(number, column)
            column += rows
        outputs = [a.local_shape("B", self.ranks, self.rank)[0] for a in expert]
        return [_Stack(columns[i], outputs[i], a.rank, a.scale) for i, a in enumerate(expert)]

    def parameter(self, number: int, half: Half) -> nn.Parameter:
        """A or B of all experts in an adapter's stack."""
        parameter: nn.Parameter = getattr(self, f"{half}{self.places[number][0]}")
        return parameter

    def part(self, number: int, half: Half, whole: Tensor) -> Tensor:
        """That of the adapter's expert."""
        return whole[self.places[number][1]]

    def forward(self, x: Tensor, out: Tensor, splits: Any) -> Tensor:
        """The output [t, out] with the adapters' part of x [t, in]; `splits`: the rows of each expert."""
        if not self.enabled:
            return out
        rows = splits
        if not isinstance(rows, ExpertRows):
            rows = ExpertRows.of(copy_to_device_async(torch.as_tensor(splits), x.device))
        a = [self._of_all_experts(n, "A") for n in range(len(self.stacks))]
        inner = grouped_linear(self._dropped(x), rows, *a).split([matrices.shape[1] for matrices in a], dim=1)
        parts = [
            grouped_linear(inner[n], rows, self._of_all_experts(n, "B"), scale=stack.scale)
            for n, stack in enumerate(self.stacks)
        ]
        return out + self._side_by_side(parts, out.shape[1])

    def _of_all_experts(self, n: int, half: Half) -> Tensor:
        """A or B of a stack as grouped products take it: zeros for experts that are not in it, and ranks filled up to
        rows of 16 bytes."""
        matrices: Tensor = getattr(self, f"{half}{n}")
        if (chosen := self.chosen[n]) is not None:
            matrices = matrices.new_zeros(self.experts, *matrices.shape[1:]).index_copy(0, chosen, matrices)
        missing = -self.stacks[n].rank % (ROW_BYTES // matrices.element_size())
        if not missing:
            return matrices
        return F.pad(matrices, (0, 0, 0, missing) if half == "A" else (0, missing))

    def _side_by_side(self, parts: Sequence[Tensor], outputs: int) -> Tensor:
        """What is added to the layer's output [t, out], from the stacks' parts of it; 0 where no module has an
        adapter."""
        columns: list[Tensor] = []
        end = 0
        for stack, part in zip(self.stacks, parts, strict=True):
            if stack.column < end:  # the same projection, of other experts
                columns[-1] = columns[-1] + part
                continue
            if stack.column > end:
                columns.append(part.new_zeros(len(part), stack.column - end))
            columns.append(part)
            end = stack.column + stack.outputs
        if end < outputs:
            columns.append(parts[0].new_zeros(len(parts[0]), outputs - end))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def grouped_adapters_forward_hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a grouped layer called with (x [t, in], rows of each expert): (output, bias) with the adapters'
    part added."""
    adapters: GroupedAdapters = getattr(layer, CHILD)
    out, *rest = output
    return adapters(args[0], out, args[1]), *rest


def attach_grouped_adapters_to_layer(layer: nn.Module, adapters: GroupedAdapters) -> None:
    """Put adapters on a grouped layer."""
    layer.add_module(CHILD, adapters)
    layer.register_forward_hook(grouped_adapters_forward_hook)
