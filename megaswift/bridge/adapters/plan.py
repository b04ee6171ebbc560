"""Low-rank adapters of a model: which Hugging Face module each belongs to, and how its two matrices are sharded over
ranks.

An adapter adds scale x B A x to a linear layer's W x (Hu et al. 2021, arXiv:2106.09685), with A [r, in] and B [out, r]
of the Hugging Face module. One of DoRA (arXiv:2402.09353) has magnitudes m [out] beside them and makes each row of W +
scale x B A as long as its m says; they lie on ranks as B's rows do. Megatron joins several modules in one layer; which
rows of its output belong to which module follows from the pieces of the base weight's rule, so nothing is said twice. A
column-parallel layer cuts B by rows, a row-parallel one A by columns; the other matrix is on every rank. Experts that
share a parameter have an A and B each like any other; that they are one tensor in a folder, with gate and up in
alternating rows, is `PeftFolderTensor`'s affair. Pure: no ranks, no files, no modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from megaswift.bridge.plan import PlanEntry, WeightPlan
from megaswift.models.targets import WEIGHT, Projection
from megaswift.models.weights.rules import TensorParallelShard, shard_dim

Half = Literal["A", "B", "M"]
"""A tensor of an adapter; M: DoRA's magnitudes."""
HALVES: tuple[Half, Half] = ("A", "B")
PREFIX = "base_model.model."
"""What PEFT puts before the module's name in its files."""
MAGNITUDE = ".lora_magnitude_vector"
"""What PEFT puts after it for DoRA's magnitudes."""
ADAPTER = "adapter."
"""Prefix of the names of adapters in a run's checkpoint."""
SAVED = "saved."
"""Prefix of the names of fully trained tensors in a run's checkpoint."""


@dataclass(frozen=True)
class AdapterHyperparameters:
    """The numbers and switches of `adapter_config.json`."""

    rank: int = 8
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of single modules, by whole name."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """alpha of modules that differ: PEFT's patterns on the end of a name."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return self.ranks.get(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return alpha / r, with rslora alpha / sqrt(r)."""
        alpha = pattern_value_for_module(self.alphas, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def pattern_value_for_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that is the end of the module's name, as PEFT reads `rank_pattern` and
    `alpha_pattern`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class ModuleAdapterSpec:
    """A and B of one Hugging Face module, with DoRA its magnitudes too."""

    projection: Projection
    entry: PlanEntry
    """The base weight."""
    rank: int
    scale: float
    dora: bool = False

    @property
    def halves(self) -> tuple[Half, ...]:
        """The tensors that it has."""
        return (*HALVES, "M") if self.dora else HALVES

    @property
    def module(self) -> str:
        """Hugging Face's name of the layer."""
        return self.projection.module

    def name(self, half: Half) -> str:
        """The tensor's name, as PEFT has it after its prefix."""
        return self.module + MAGNITUDE if half == "M" else f"{self.module}.lora_{half}.weight"

    def shape(self, half: Half) -> tuple[int, ...]:
        """A [r, in], B [out, r], M [out]."""
        out, width = self.projection.shape
        if half == "M":
            return (out,)
        return (self.rank, width) if half == "A" else (out, self.rank)

    def sharded(self, half: Half) -> bool:
        """Return whether tensor-parallel ranks (for experts: expert-tensor-parallel ones) hold different parts of
        it."""
        return self.entry.shard == ("row" if half == "A" else "column")

    def ranges(self, half: Half, tp: int, rank: int) -> list[tuple[int, int]]:
        """Return which columns of A, or which rows of B and M, a rank holds, in its order."""
        size = self.shape(half)[tp_dim_of_adapter_half(half)]
        if not self.sharded(half):
            return [(0, size)]
        rank_pieces = [
            p for p in self.entry.pieces(TensorParallelShard(tp, rank)) if p.source == self.projection.source
        ]
        # alternating rows, one kind after the other
        first = [p.start % p.stride * (size // p.stride) + p.start // p.stride for p in rank_pieces]
        return [(start, start + p.length) for start, p in zip(first, rank_pieces, strict=True)]

    def local_shape(self, half: Half, tp: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        n = sum(stop - start for start, stop in self.ranges(half, tp, rank))
        return (self.rank, n) if half == "A" else (n, *self.shape(half)[1:])

    def take(self, half: Half, full: Tensor, tp: int, rank: int) -> Tensor:
        """Cut a rank's part out of the whole tensor."""
        dim = tp_dim_of_adapter_half(half)
        parts = [full.narrow(dim, start, stop - start) for start, stop in self.ranges(half, tp, rank)]
        return torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)

    def join(self, half: Half, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks, in order, to the whole tensor; of a replicated one the first counts."""
        if not self.sharded(half):
            return parts[0]
        dim = tp_dim_of_adapter_half(half)
        joined = parts[0].new_empty(self.shape(half))
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop in self.ranges(half, len(parts), rank):
                joined.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
                offset += stop - start
        return joined

    def rows(self, b: Tensor) -> Tensor:
        """Return B with its rows in Hugging Face's order."""
        return interleave_gate_up(b, self.projection.alternating)

    @torch.no_grad()
    def merged(self, weight: Tensor, a: Tensor, b: Tensor, m: Tensor | None = None) -> Tensor:
        """Merge this adapter into the weight: float32 [out, in], or [in, out] for an expert in a turned stack."""
        change = (self.rows(b).float() @ a.float()).mul_(self.scale)
        merged = (change.t() if self.projection.turned else change).add_(weight.float())
        return merged if m is None else merged.mul_(dora_row_scale(m, merged.square().sum(1))[:, None])


def interleave_gate_up(rows: Tensor, kinds: int) -> Tensor:
    """Reorder [gates; ups] to gate, up, gate, up, ..."""
    return rows if kinds == 1 else rows.unflatten(0, (kinds, -1)).transpose(0, 1).flatten(0, 1)


def deinterleave_gate_up(rows: Tensor, kinds: int) -> Tensor:
    """Undo `interleave_gate_up`."""
    return rows if kinds == 1 else rows.unflatten(0, (-1, kinds)).transpose(0, 1).flatten(0, 1)


def merge_adapters_into_weight(
    adapters: Sequence[ModuleAdapterSpec], weight: Tensor, halves: Sequence[Sequence[Tensor]]
) -> Tensor:
    """Merge adapters into a Hugging Face tensor, float32: one adapter, or one for each expert of a stack."""
    if not adapters[0].projection.stack:
        return adapters[0].merged(weight, *halves[0])
    return torch.stack([a.merged(w, *h) for a, w, h in zip(adapters, weight, halves, strict=True)])


def dora_row_scale(m: Tensor, squares: Tensor) -> Tensor:
    """Return the factor of each row under DoRA, m over the row's length, float32 [out], from the sums of squares of the
    rows.

    The length is rounded as m is, so that m = length gives 1 in any dtype: a new adapter changes nothing.
    """
    return m.float() / squares.sqrt().to(m.dtype).float()


def tp_dim_of_adapter_half(half: Half) -> int:
    """Return the dimension that tensor parallelism cuts: columns of A, rows of B and M."""
    return 1 if half == "A" else 0


def rank_output_rows_by_adapter(
    adapters: Sequence[ModuleAdapterSpec], tp: int, rank: int
) -> list[tuple[int | None, int]]:
    """Return (number of the adapter, or None; rows) for each run of rows in a rank's output of the layer that these
    adapters share."""
    entry = adapters[0].entry
    if shard_dim(entry.rule) == 1:
        return [(0, adapters[0].projection.shape[0])]
    by_source = {a.projection.source: i for i, a in enumerate(adapters)}
    # neighbours of one adapter are one run: a gated delta net has pieces for each head, in the order of B's rows
    owned = [(by_source.get(p.source), p.length) for p in entry.pieces(TensorParallelShard(tp, rank))]
    return [(number, sum(n for _, n in run)) for number, run in groupby(owned, key=itemgetter(0))]


@dataclass(frozen=True)
class PeftFolderTensor:
    """A tensor of an adapter folder, as PEFT has it: one module's, or a stack's of all experts."""

    name: str
    half: Half
    adapters: tuple[ModuleAdapterSpec, ...]
    """One, or every expert's in order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """A stack's are A [experts x r, in] and B [out, r x experts]."""
        shape = list(self.adapters[0].shape(self.half))
        dim = 1 - tp_dim_of_adapter_half(self.half)
        if len(self.adapters) > 1:
            shape[dim] *= len(self.adapters)
        return tuple(shape)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the tensors of its adapters: A expert by expert, B's columns rank by rank (PEFT's `ParamWrapper`)."""
        if self.half == "A":
            return torch.cat(list(parts))
        rows = [a.rows(part) for a, part in zip(self.adapters, parts, strict=True)]
        return rows[0] if len(rows) == 1 else torch.stack(rows, -1).flatten(1)


def _stored(adapters: Sequence[ModuleAdapterSpec]) -> Iterator[PeftFolderTensor]:
    """PEFT wraps the module of stacks once for each, the first one innermost, and names it by that."""
    stacks: dict[str, list[ModuleAdapterSpec]] = {}
    for a in adapters:
        stacks.setdefault(a.projection.weight, []).append(a)
    for stack, members in stacks.items():
        first = members[0]
        if not first.projection.stack:
            yield from (PeftFolderTensor(first.name(half), half, (first,)) for half in first.halves)
            continue
        home = stack.rpartition(".")[0]
        same = [s for s in stacks if s.rpartition(".")[0] == home]
        wrapped = home + ".base_layer" * (len(same) - 1 - same.index(stack))
        yield from (PeftFolderTensor(f"{wrapped}.lora_{half}.weight", half, tuple(members)) for half in HALVES)


class AdapterPlan:
    """All adapters of a model, in the order of the weight table."""

    def __init__(
        self,
        plan: WeightPlan,
        chosen: Iterable[Projection],
        settings: AdapterHyperparameters,
        saved: Iterable[str] = (),
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.saved: tuple[str, ...] = tuple(saved)
        """Hugging Face tensors that train fully beside them."""
        self.adapters: tuple[ModuleAdapterSpec, ...] = tuple(
            ModuleAdapterSpec(
                p,
                plan.by_megatron[p.megatron + WEIGHT],
                settings.rank_of(p.module),
                settings.scale_of(p.module),
                settings.dora,
            )
            for p in chosen
        )
        self.by_layer: dict[str, list[ModuleAdapterSpec]] = {}
        for adapter in self.adapters:
            pieces = adapter.entry.pieces(TensorParallelShard())
            plain = all(not p.at and not p.transposed and p.stride == 1 for p in pieces)
            assert plain or adapter.projection.stack, f"{adapter.module} is not a plain matrix"
            self.by_layer.setdefault(adapter.projection.megatron, []).append(adapter)
        self.by_module: dict[str, ModuleAdapterSpec] = {a.module: a for a in self.adapters}
        self.by_weight: dict[str, list[ModuleAdapterSpec]] = {}
        """Hugging Face tensor -> its adapter, or those of the experts in it."""
        for adapter in self.adapters:
            self.by_weight.setdefault(adapter.projection.weight, []).append(adapter)
        self.stored: tuple[PeftFolderTensor, ...] = tuple(_stored(self.adapters))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the adapter folder, by name without PEFT's prefix."""
        shapes: dict[str, tuple[int, ...]] = {s.name: s.shape for s in self.stored}
        return shapes | {name: self.plan.hf_shapes[name] for name in self.saved}

    @property
    def added(self) -> int:
        """Parameters that the adapters add to the model."""
        return sum(math.prod(a.shape(half)) for a in self.adapters for half in a.halves)

    @property
    def parameters(self) -> int:
        """Parameters that train: the adapters' and those of the modules that train fully."""
        return sum(math.prod(shape) for shape in self.shapes().values())
