"""How one Megatron parameter is made from Hugging Face tensors, and how it is cut over tensor-parallel ranks.

A rule states one direction only: `pieces(spec, cut)` lists, in order, which ranges of which HF tensors lie in one
shard. Reading joins these ranges, writing puts them back: the bridge derives both, and checks that the pieces of all
shards cover every HF element exactly once. Rules are pure integer arithmetic: names and shapes only, no tensors, no
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol, cast

from megaswift.errors import LayoutError, Problem
from megaswift.models.spec import ModelSpec

Shard = Literal["column", "row", "vocab", "replicated"]
Scope = Literal["model", "layer", "attention", "linear", "dense", "moe", "expert"]
"""Once in the model; in every layer; in layers with attention or with a linear state; in dense or in MoE layers; in
every expert of every MoE layer (`LayerKind.scopes`)."""


@dataclass(frozen=True)
class TensorParallelShard:
    """Which shard: that of `rank` out of `tp`, with the vocabulary padded to `padded_vocab` rows (None: not padded)."""

    tp: int = 1
    rank: int = 0
    padded_vocab: int | None = None
    expert: int | None = None
    """Global number of the expert, where the rule is about one."""


@dataclass(frozen=True)
class SliceMap:
    """Rows or columns [start, stop) of HF tensor number `source`, or every `stride`-th of them."""

    source: int
    start: int
    stop: int
    stride: int = 1
    at: tuple[int, ...] = ()
    """Leading indices: the expert in a tensor that holds all of them."""
    transposed: bool = False
    """HF keeps [in, out] where Megatron has [out, in]."""

    @property
    def length(self) -> int:
        """How many rows or columns these are."""
        return -(-(self.stop - self.start) // self.stride)

    def hf_dim(self, dim: int) -> int:
        """The dimension of the HF tensor that becomes the parameter's dimension `dim`."""
        return len(self.at) + (1 - dim if self.transposed else dim)

    def shape(self, hf: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Shape of this part of a parameter, from the HF tensor's."""
        inner = list(hf[len(self.at) :])
        if self.transposed:
            inner.reverse()
        inner[dim] = self.length
        return tuple(inner)


class WeightRule(Protocol):
    """One line of a family's weight table. Names hold {L} for the layer and {E} for the expert."""

    shard: ClassVar[Shard]

    @property
    def megatron(self) -> str:
        """Megatron's name."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Hugging Face's names."""

    @property
    def scope(self) -> Scope:
        """The layers it holds for."""

    @property
    def when(self) -> str:
        """The models it holds for: a condition of `ModelSpec`, empty for all."""

    @property
    def stacked(self) -> bool:
        """Whether one HF tensor holds all experts of a layer."""

    @property
    def buffer(self) -> bool:
        """Whether it is a buffer of the module: saved and exported, not trained by gradients."""

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """Shape of each HF tensor."""

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """What the shard is made of, joined along `dim`."""


def shard_dim(rule: WeightRule) -> int:
    """The dimension along which pieces are joined and shards are cut: 1 for a row-parallel weight, else 0."""
    return 1 if rule.shard == "row" else 0


def even_share(total: int, tp: int, what: str) -> int:
    """total / tp; a LayoutError where that is no whole number."""
    if total % tp:
        raise LayoutError(Problem(f"tensor parallel size {tp}", f"does not divide {what} ({total})"))
    return total // tp


def shard_range(total: int, shard: TensorParallelShard, what: str) -> tuple[int, int]:
    """(start, stop) of a rank's even part of `total` rows or columns."""
    n = even_share(total, shard.tp, what)
    return shard.rank * n, (shard.rank + 1) * n


def slices_of_shard(rows: Sequence[SliceMap], shard: TensorParallelShard, what: str) -> list[SliceMap]:
    """What a rank's even part of `rows`, laid one after the other, is made of."""
    ends = list(accumulate(piece.length for piece in rows))
    first, end = shard_range(ends[-1], shard, what)
    slices = []
    for piece, stop in zip(rows, ends, strict=True):
        offset = stop - piece.length
        low = max(first - offset, 0)
        high = min(end - offset, piece.length)
        if low < high:
            slices.append(replace(piece, start=piece.start + low, stop=piece.start + high))
    return slices


def scoped(rules: Sequence[WeightRule], scope: Scope) -> tuple[WeightRule, ...]:
    """The same rules for the layers of a scope; not those of a `FusedHfTensorRule`, whose parts have it."""
    return tuple(replace(cast(Any, rule), scope=scope) for rule in rules)


def spec_sizes(spec: ModelSpec, names: Sequence[str]) -> tuple[int, ...]:
    """Sizes by the names of ModelSpec's properties."""
    return tuple(getattr(spec, name) for name in names)


@dataclass(frozen=True)
class _One:
    """One tensor of `dims`."""

    megatron: str
    hf: tuple[str]
    dims: tuple[str, ...]
    scope: Scope = "layer"
    when: str = ""
    buffer: bool = False
    stacked: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[*dims]."""
        return [spec_sizes(spec, self.dims)]


class ReplicatedRule(_One):
    """The same tensor on every rank: norms, routers, biases after a row-parallel layer; also buffers, such as a
    router's expert bias."""

    shard: ClassVar[Shard] = "replicated"

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """All of it."""
        return [SliceMap(0, 0, self.shapes(spec)[0][0])]


class OneRowRule(_One):
    """A vector on every rank that Hugging Face keeps as a matrix of one row; `dims` are the matrix's."""

    shard: ClassVar[Shard] = "replicated"

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """The row."""
        return [SliceMap(0, 0, self.shapes(spec)[0][1], at=(0,))]


class _Even(_One):
    """The same, cut evenly along one of them."""

    along: ClassVar[int]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """A range of rows or columns."""
        width = self.dims[self.along]
        return [SliceMap(0, *shard_range(getattr(spec, width), shard, width))]


class ColumnParallelRule(_Even):
    """[out, in], cut along the output; also vectors [out]: norms over all heads together, attention sinks."""

    shard: ClassVar[Shard] = "column"
    along = 0


class RowParallelRule(_Even):
    """[out, in], cut along the input: attention's output projection, the second MLP layer."""

    shard: ClassVar[Shard] = "row"
    along = 1


@dataclass(frozen=True)
class FusedQKVRule:
    """Query, key and value projections in Megatron's order: for each KV group [its query heads; its key head; its value
    head].

    A rank holds whole groups; of more ranks than groups each holds equal rows of one, which Megatron gathers in the
    forward pass. `matrix` False is for the biases.
    """

    megatron: str
    hf: tuple[str, str, str]
    matrix: bool = True
    scope: Scope = "layer"
    when: str = ""
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[heads x d, h], [KV heads x d, h] twice; without h for biases."""
        tail = (spec.hidden_size,) if self.matrix else ()
        return [(n * spec.head_dim, *tail) for n in (spec.heads, spec.kv_heads, spec.kv_heads)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """Three ranges for each of this rank's groups, or the part of a group that falls to it."""
        q = even_share(spec.heads, spec.kv_heads, "attention heads") * spec.head_dim
        widths = ((0, q), (1, spec.head_dim), (2, spec.head_dim))
        rows = [SliceMap(n, g * width, (g + 1) * width) for g in range(spec.kv_heads) for n, width in widths]
        return slices_of_shard(rows, shard, "rows of queries, keys and values")


@dataclass(frozen=True)
class FusedGatedQKVRule:
    """Projections of attention whose output is gated: Hugging Face's query projection has, for each head, [query;
    gate], Megatron's layer for each KV group [its query heads; their gates; its key head; its value head]. With
    `alternating` the gate of each query head follows it, as in ms-swift's layer."""

    megatron: str
    hf: tuple[str, str, str]
    scope: Scope = "layer"
    when: str = ""
    alternating: bool = False
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[2 heads x d, h], [KV heads x d, h] twice."""
        return [(n * spec.head_dim, spec.hidden_size) for n in (2 * spec.heads, spec.kv_heads, spec.kv_heads)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """A range for each head and each gate of this rank's groups, or of the part of a group that falls to it."""
        d = spec.head_dim
        heads = even_share(spec.heads, spec.kv_heads, "attention heads")
        rows = []
        for group in range(spec.kv_heads):
            of_group = range(2 * group * heads, 2 * (group + 1) * heads)
            order = of_group if self.alternating else (*of_group[::2], *of_group[1::2])
            rows += [SliceMap(0, n * d, (n + 1) * d) for n in order]
            rows += [SliceMap(source, group * d, (group + 1) * d) for source in (1, 2)]
        return slices_of_shard(rows, shard, "rows of queries, gates, keys and values")


@dataclass(frozen=True)
class GateUpRule:
    """Gate and up projections: on each rank [its part of gate; its part of up]."""

    megatron: str
    hf: tuple[str, str]
    inner: str = "ffn"
    matrix: bool = True
    scope: Scope = "layer"
    when: str = ""
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[ffn, h] twice; without h for biases."""
        return [(getattr(spec, self.inner), *((spec.hidden_size,) if self.matrix else ()))] * 2

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """One range of each."""
        part = shard_range(getattr(spec, self.inner), shard, self.inner)
        return [SliceMap(source, *part) for source in (0, 1)]


@dataclass(frozen=True)
class VocabParallelRule:
    """[vocab, h], cut along the vocabulary; the bridge pads it with zero rows to the padded size, and cuts these off
    again."""

    megatron: str
    hf: tuple[str]
    scope: Scope = "model"
    when: str = ""
    shard: ClassVar[Shard] = "vocab"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[vocab, h], without padding."""
        return [(spec.vocab_size, spec.hidden_size)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """This rank's rows, those of the padding included: a piece may reach beyond the HF tensor."""
        return [SliceMap(0, *shard_range(shard.padded_vocab or spec.vocab_size, shard, "padded vocabulary"))]


@dataclass(frozen=True)
class FusedHfTensorRule:
    """`parts` with its HF tensors joined by rows, in their order, into the one called `name`."""

    parts: WeightRule
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

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """Those of the parts, as rows of the one tensor."""
        first = [0, *accumulate(s[0] for s in self.parts.shapes(spec))]
        return [
            replace(p, source=0, start=first[p.source] + p.start, stop=first[p.source] + p.stop)
            for p in self.parts.pieces(spec, shard)
        ]


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
    """The second matrix of every expert, [E, f, h], or [E, h, f] unless `turned`: [h, f / tp], cut along the inner
    width."""

    megatron: str
    hf: tuple[str]
    turned: bool = True
    scope: Scope = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "row"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[E, f, h] or [E, h, f]."""
        matrix = (spec.expert_ffn, spec.hidden_size) if self.turned else (spec.hidden_size, spec.expert_ffn)
        return [(spec.experts, *matrix)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """A range of the inner width."""
        return [SliceMap(0, *shard_range(spec.expert_ffn, shard, "expert_ffn"), 1, _expert(shard), self.turned)]


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


@dataclass(frozen=True)
class StackedGateUp:
    """Gate and up of every expert, [E, 2 f, h] with all rows of gate before those of up: on each rank [its gates; its
    ups], [2 f / tp, h]."""

    megatron: str
    hf: tuple[str]
    scope: Scope = "expert"
    when: str = ""
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = True
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[E, 2 f, h]."""
        return [(spec.experts, 2 * spec.expert_ffn, spec.hidden_size)]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """One range of each."""
        first, stop = shard_range(spec.expert_ffn, shard, "expert_ffn")
        f = spec.expert_ffn
        return [SliceMap(0, part * f + first, part * f + stop, 1, _expert(shard)) for part in (0, 1)]


def renamed(rules: Sequence[WeightRule], before: str, after: str) -> tuple[WeightRule, ...]:
    """The same rules for tensors that have `after` in the place of `before` at the beginning of their names."""

    def rename(name: str) -> str:
        return after + name.removeprefix(before) if name.startswith(before) else name

    return tuple(replace(cast(Any, rule), hf=tuple(map(rename, rule.hf))) for rule in rules)
