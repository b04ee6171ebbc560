"""Finds the part of a whole tensor that a rank of a layout holds, in Megatron's order, and the inverse.

Activations are [tokens, columns]: tokens with the position first ([s x b]), by context parallelism in zigzag order and
by sequence parallelism in parts; columns by tensor parallelism, those of fused products as the weights' rows lie.
Shards of weights come from the weight plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megaswift.bisection.trace_folder import BACKWARD, OUTPUT, Entry
from megaswift.bridge.adapters.plan import AdapterPlan, Half, ModuleAdapterSpec
from megaswift.bridge.hf.source import Slices
from megaswift.bridge.plan import PlanEntry, WeightPlan
from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import TensorParallelShard
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.layout import Coordinates, Layout

FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that stand alone in Megatron-Core's own layers, and what the weight plan calls their weights."""


@dataclass(frozen=True)
class Rows:
    """The rows of one micro-batch: how tokens lie."""

    valid: Tensor
    """bool [b, s]: False on padding."""
    cu_seqlens: Tensor | None

    @cached_property
    def mask(self) -> Tensor:
        """bool [s x b]."""
        return self.valid.t().reshape(-1)


def plan_entry(plan: WeightPlan, parameter: str) -> PlanEntry | None:
    """The entry of a parameter by its name in a trace: without `decoder.`, and norms as a plain Megatron names them."""
    for name in (parameter, f"decoder.{parameter}"):
        if name in plan.by_megatron:
            return plan.by_megatron[name]
    stem, _, _ = parameter.rpartition(".")
    layer, _, norm = stem.rpartition(".")
    return plan.by_megatron.get(f"decoder.{layer}.{FUSED_NORMS[norm]}") if norm in FUSED_NORMS else None


def adapter_parameter(adapter: ModuleAdapterSpec, half: Half) -> str:
    """Return what a trace calls a matrix of an adapter: Megatron's layer, then Hugging Face's module in it."""
    layer = adapter.projection.megatron.removeprefix("decoder.")
    return f"{layer}.{adapter.projection.leaf}{adapter.name(half).removeprefix(adapter.module)}"


@dataclass(frozen=True)
class AdapterMatrix:
    """A matrix of an adapter, with what `PlanEntry` has for weights."""

    adapter: ModuleAdapterSpec
    half: Half

    @property
    def megatron(self) -> str:
        """Return its name in a trace."""
        return adapter_parameter(self.adapter, self.half)

    @property
    def hf(self) -> tuple[str]:
        """Return its name in the adapter's folder."""
        return (self.adapter.name(self.half),)

    @property
    def expert(self) -> int | None:
        """The expert that it belongs to."""
        return self.adapter.entry.expert

    def shard_shape(self, tp: int, _: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return self.adapter.local_shape(self.half, tp, 0)

    def read(self, source: _Tensors, tp: int, rank: int, _: int | None = None) -> Tensor:
        """Return a rank's part."""
        return self.adapter.take(self.half, source.tensors[self.hf[0]], tp, rank)


class Placement:
    """Cuts whole tensors for the ranks of a layout."""

    def __init__(self, plan: WeightPlan, spec: ModelSpec, layout: Layout, adapters: AdapterPlan | None = None) -> None:
        self.plan = plan
        self.spec = spec
        self.layout = layout
        self.padded = padded_vocabulary_size(spec, layout.tp)
        matrices = [AdapterMatrix(one, half) for one in (adapters.adapters if adapters else ()) for half in one.halves]
        self.adapters = {matrix.megatron: matrix for matrix in matrices}
        """Matrices of adapters by their names in a trace."""

    def parameter(self, name: str) -> PlanEntry | AdapterMatrix | None:
        """Return what a trace calls by a name: a weight of the model, or a matrix of an adapter."""
        return self.adapters.get(name) or plan_entry(self.plan, name)

    def tokens(self, count: int, rows: Rows, place: Coordinates) -> Tensor | None:
        """int64 [count]: which of the [s x b] tokens a rank holds; None where no share has so many."""
        from megaswift.engine.megatron.context_parallel import local_row_positions

        b, s = rows.valid.shape
        if count == b * s:
            return torch.arange(b * s)
        positions = local_row_positions(s, rows.cu_seqlens, self.layout.cp, place.cp)
        if count * self.layout.tp == len(positions) * b:
            positions = positions.chunk(self.layout.tp)[place.tp]
        if count != len(positions) * b:
            return None
        return (positions[:, None] * b + torch.arange(b)).reshape(-1)

    def columns(self, name: str, count: int, whole: int, place: Coordinates) -> Tensor | None:
        """int64 [count]: which of the `whole` columns a rank holds, of the joined outputs of Hugging Face's modules."""
        tp = self.layout.tp
        entry = plan_entry(self.plan, f"{name}.weight")
        if entry is not None and entry.shard == "column":
            pieces = entry.pieces(TensorParallelShard(tp, place.tp, self.padded))
            first = torch.tensor([0, *(shape[0] for shape in entry.hf_shapes)]).cumsum(0).tolist()
            found = [torch.arange(first[p.source] + p.start, first[p.source] + p.stop, p.stride) for p in pieces]
            joined = torch.cat(found)
            return joined if len(joined) == count and first[-1] == whole else None
        if count == whole:
            return torch.arange(whole)
        if name == "output_layer":
            return torch.arange(place.tp * count, (place.tp + 1) * count)
        if whole == count * tp:
            return torch.arange(place.tp * count, (place.tp + 1) * count)
        if count < whole and whole % count == 0:  # more ranks than heads of keys: several have the same one
            part = place.tp * (whole // count) // tp
            return torch.arange(part * count, (part + 1) * count)
        return None

    def cut_activation(
        self, whole: Tensor, shape: torch.Size, entry: Entry, rows: Rows, place: Coordinates
    ) -> tuple[Tensor, Tensor] | None:
        """(part of a whole tensor [s x b, columns] that a rank holds, bool [tokens]: no padding) of a recorded tensor
        of this shape; None where the shapes do not go together."""
        tokens = self.tokens(shape[0], rows, place)
        columns = self.columns(entry.name, shape[1], whole.shape[1], place)
        if tokens is None or columns is None:
            return None
        if entry.kind == BACKWARD and shape[1] < whole.shape[1] < shape[1] * self.layout.tp:
            return None  # ranks that share a head of keys have parts of its gradient
        beyond = int((columns >= whole.shape[1]).sum())  # of the padded vocabulary
        part = whole[tokens][:, columns[: len(columns) - beyond]]
        return part, rows.mask[tokens]

    def cut_parameter(self, whole: Mapping[str, Tensor], entry: Entry, count: int, place: Coordinates) -> Tensor | None:
        """The flat elements of a rank's shard, from tensors by their Hugging Face names."""
        found = self.parameter(entry.name)
        if found is None or any(name not in whole for name in found.hf):
            return None
        ranks, rank = (self.layout.tp, place.tp) if found.expert is None else (self.layout.etp, place.etp)
        shard = found.read(_Tensors(whole), ranks, rank, self.padded)
        return shard.reshape(-1)[entry.start : entry.start + count]

    def join_activation(
        self, parts: Sequence[tuple[Tensor, Coordinates]], entry: Entry, rows: Rows, whole: int
    ) -> Tensor | None:
        """The whole tensor [s x b, columns] of all ranks' parts; of copies the first counts."""
        joined = torch.zeros(rows.valid.numel(), whole, dtype=parts[0][0].dtype)
        for part, place in reversed(parts):
            tokens = self.tokens(len(part), rows, place)
            columns = self.columns(entry.name, part.shape[1], whole, place)
            if tokens is None or columns is None:
                return None
            inside = columns < whole
            joined[tokens[:, None], columns[inside]] = part[:, inside]
        return joined


class _Tensors:
    """Tensors as the weight plan reads files."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def slice(self, name: str, where: Slices) -> Tensor:
        """A part of a tensor."""
        return self.tensors[name][tuple(where)]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[name].dtype


def is_activation(entry: Entry) -> bool:
    """True for a tensor of shape [tokens, columns]."""
    return entry.kind in (OUTPUT, BACKWARD)
