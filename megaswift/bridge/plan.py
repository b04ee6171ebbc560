"""The weight plan of one model: every Megatron parameter and the Hugging Face tensors that it maps to.

Owns both directions of a family's rules on real tensors, and the check that a folder holds the model. Which rank holds
which layer or expert is the engine's affair; files are read and written by
`hf.source` and `hf.writer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from megaswift.bridge.hf.source import TensorMeta, TensorSource, WeightSource
from megaswift.errors import Problem, WeightsError
from megaswift.models.family import Family
from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import Shard, SliceMap, TensorParallelShard, WeightRule, shard_dim
from megaswift.models.weights.table import format_rule_name, shard_shape

FLOATS = ("F32", "BF16", "F16", "F64")
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
"""Megatron's name of the embedding."""
SHOWN = 8
"""Problems of one kind that are listed in full."""


@dataclass(frozen=True)
class IgnoredTensors:
    """Stored tensors that carry nothing of their own."""

    pattern: str
    why: str

    def matches(self, name: str) -> bool:
        """Return whether a tensor of this name is meant."""
        return re.fullmatch(self.pattern, name) is not None


INV_FREQ = IgnoredTensors(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "follows from config.json")
TIED_HEAD = IgnoredTensors(r"lm_head\.weight", "a stored duplicate of the tied embedding")
OTHER_HEAD = IgnoredTensors(r"lm_head\.weight", "the vocabulary head, which another head replaces")


@dataclass(frozen=True)
class PlanEntry:
    """One Megatron parameter."""

    rule: WeightRule
    spec: ModelSpec
    layer: int | None = None
    expert: int | None = None
    """Global number of the expert."""

    @property
    def megatron(self) -> str:
        """Full canonical name."""
        return format_rule_name(self.rule.megatron, self.layer, self.expert)

    @property
    def hf(self) -> tuple[str, ...]:
        """Full Hugging Face names."""
        return tuple(format_rule_name(name, self.layer, self.expert) for name in self.rule.hf)

    @property
    def shard(self) -> Shard:
        """How tensor parallelism cuts it."""
        return self.rule.shard

    @property
    def hf_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each HF tensor."""
        return self.rule.shapes(self.spec)

    def pieces(self, shard: TensorParallelShard) -> list[SliceMap]:
        """Return the pieces of Hugging Face tensors of which a shard is made."""
        return self.rule.pieces(self.spec, replace(shard, expert=self.expert))

    def shard_shape(self, tp: int = 1, padded_vocab: int | None = None) -> tuple[int, ...]:
        """Return the shape of one rank's shard."""
        return shard_shape(self.rule, self.spec, TensorParallelShard(tp, 0, padded_vocab, self.expert))

    def full_shape(self, padded_vocab: int | None = None) -> tuple[int, ...]:
        """Return the shape of the whole parameter, vocabulary padding included."""
        return self.shard_shape(1, padded_vocab)

    def read(self, source: TensorSource, tp: int = 1, rank: int = 0, padded_vocab: int | None = None) -> Tensor:
        """Read the shard of `rank` (for experts: of the expert-tensor-parallel group), and no more than that. Padding
        is zero."""
        dim = shard_dim(self.rule)
        names = self.hf
        shapes = self.hf_shapes
        parts = []
        for piece in self.pieces(TensorParallelShard(tp, rank, padded_vocab)):
            shape = shapes[piece.source]
            along = piece.hf_dim(dim)
            start, stop = (min(x, shape[along]) for x in (piece.start, piece.stop))
            if stop > start:
                lead = [slice(i, i + 1) for i in piece.at] + [slice(0, n) for n in shape[len(piece.at) : along]]
                where = (*lead, slice(start, stop))
                part = source.slice(names[piece.source], where).flatten(0, len(piece.at))  # the expert's dimension goes
                parts.append(_of_shard(part, piece, dim))
            if piece.stop > shape[along]:
                padding = list(shape)
                padding[dim] = piece.stop - max(piece.start, shape[dim])
                device = parts[0].device if parts else None
                parts.append(torch.zeros(padding, dtype=source.dtype(names[piece.source]), device=device))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor], shards: Sequence[Tensor]) -> int:
        """Write the shards of all ranks, in order, into the full HF tensors of `whole` (made where missing); how many
        elements.

        The first shard of a replicated parameter counts.
        """
        dim = shard_dim(self.rule)
        shapes = self.hf_shapes
        covered = 0
        shards = list(shards[:1] if self.shard == "replicated" else shards)
        if (
            len(shapes) == len(shards) == 1
            and tuple(shards[0].shape) == shapes[0]
            and len(self.pieces(TensorParallelShard())) == 1
        ):
            tensors[self.hf[0]] = shards[0]
            return shards[0].numel()
        for name, shape in zip(self.hf, shapes, strict=True):
            if name not in tensors:
                tensors[name] = shards[0].new_empty(shape)
        padded = sum(s.shape[dim] for s in shards) if self.shard == "vocab" else None
        expected = self.shard_shape(len(shards), padded)
        for rank, shard in enumerate(shards):
            assert tuple(shard.shape) == expected, (
                f"{self.megatron}: shard {rank} is {tuple(shard.shape)}, must be {expected}"
            )
            offset = 0
            for piece in self.pieces(TensorParallelShard(len(shards), rank, padded)):
                into = tensors[self.hf[piece.source]][piece.at]
                along = piece.hf_dim(dim) - len(piece.at)
                start, stop = (min(x, into.shape[along]) for x in (piece.start, piece.stop))
                target = _of_shard(into.narrow(along, start, stop - start), piece, dim)
                target.copy_(shard.narrow(dim, offset, target.shape[dim]))
                offset = offset + piece.length
                covered = covered + target.numel()
        return covered


def _of_shard(part: Tensor, piece: SliceMap, dim: int) -> Tensor:
    """A contiguous range of an HF tensor as the view that lies in a shard."""
    part = part.t() if piece.transposed else part
    return part if piece.stride == 1 else part[(slice(None),) * dim + (slice(None, None, piece.stride),)]


@dataclass(frozen=True)
class EntriesOfSameHfTensors:
    """Parameters that are made of the same HF tensors: all experts where one tensor holds them, else a single entry."""

    entries: tuple[PlanEntry, ...]

    def write(self, shards: Iterable[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Join the shards to full tensors by HF name; `shards` are those of each entry, taken one entry at a time."""
        tensors: dict[str, Tensor] = {}
        covered = sum(entry.put(tensors, parts) for entry, parts in zip(self.entries, shards, strict=True))
        assert covered == sum(t.numel() for t in tensors.values()), (
            f"{self.entries[0].megatron}: the shards do not cover {[*tensors]}"
        )
        return tensors


def _foreign_prefix(missing: Sequence[str], stored: Collection[str]) -> str:
    """Return the prefix that a folder puts before the names of most missing tensors (`module.`), or an empty text."""
    for name in missing[:1]:
        for other in stored:
            prefix = other.removesuffix(name)
            if prefix != other and 2 * sum(prefix + each in stored for each in missing) > len(missing):
                return prefix
    return ""


class WeightPlan:
    """All parameters of a model, in the order of export. Every HF tensor and every Megatron parameter is in exactly one
    entry."""

    def __init__(self, family: Family, spec: ModelSpec) -> None:
        self.family = family
        self.spec = spec
        self.entries: tuple[PlanEntry, ...] = tuple(
            PlanEntry(rule, spec, layer, expert) for rule, layer, expert in family.places(spec)
        )
        self.by_megatron: dict[str, PlanEntry] = {e.megatron: e for e in self.entries}
        self.groups: tuple[EntriesOfSameHfTensors, ...] = tuple(
            EntriesOfSameHfTensors(tuple(same)) for _, same in groupby(self.entries, key=lambda entry: entry.hf)
        )
        self.by_hf: dict[str, EntriesOfSameHfTensors] = {
            name: group for group in self.groups for name in group.entries[0].hf
        }
        self.hf_shapes: dict[str, tuple[int, ...]] = {
            n: s for e in self.entries for n, s in zip(e.hf, e.hf_shapes, strict=True)
        }
        assert len(self.by_megatron) == len(self.entries), f"family {family.name}: a Megatron name is used twice"
        assert len(self.by_hf) == sum(len(g.entries[0].hf) for g in self.groups), (
            f"family {family.name}: an HF name is used twice"
        )
        self.ignored: tuple[IgnoredTensors, ...] = (INV_FREQ,)
        if spec.tied:
            self.ignored += (TIED_HEAD,)
        elif not spec.untied:
            self.ignored += (OTHER_HEAD,)
        self._kept = family.kept(spec) if family.kept is not None else None

    @property
    def parameters(self) -> int:
        """Parameters of the model, without vocabulary padding and buffers."""
        buffers = {name for e in self.entries if e.rule.buffer for name in e.hf}
        return sum(math.prod(shape) for name, shape in self.hf_shapes.items() if name not in buffers)

    def kept(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are carried along unchanged, sorted."""
        pattern = self._kept
        if pattern is None:
            return []
        return sorted(name for name in names if re.fullmatch(pattern, name) and name not in self.by_hf)

    @property
    def copies(self) -> dict[str, str]:
        """Map each carried tensor that repeats a tensor of the model to that tensor's name, if the layer it belongs to
        trains: an export writes the trained values in its place."""
        table = self.family.mtp
        found = {} if table is None else table.copied_tensors(self.spec)
        embedding = self.by_megatron[EMBEDDING].hf[0]
        return {copy: name if name in self.by_hf else embedding for copy, name in found.items()}

    def hf_tensors(self, dtypes: Mapping[str, torch.dtype] | torch.dtype) -> dict[str, TensorMeta]:
        """Return every HF tensor with its shape and dtype, in the order of export."""
        single_dtype = dtypes if isinstance(dtypes, torch.dtype) else None
        return {name: TensorMeta(shape, single_dtype or dtypes[name]) for name, shape in self.hf_shapes.items()}  # type: ignore[index]

    def check(self, source: WeightSource, contents: bool = True) -> list[str]:
        """Check that `source` holds this model: a WeightsError names each missing, unmapped or wrong tensor with its
        file.

        The answer is the names that are ignored. With `contents`, a stored duplicate of a tied head must equal the
        embedding.
        """
        problems: list[Problem] = []
        # Missing tensors. A prefix before every name is one mistake, so it is reported alone.
        names = set(source.names())
        missing = [name for name in self.by_hf if name not in names]
        prefix = _foreign_prefix(missing, names)
        if prefix:
            rule = f"stores its tensors with the prefix {prefix!r} before the names of {self.family.name}"
            raise WeightsError(Problem(str(source.directory), rule, "save it with transformers' save_pretrained"))
        problems += [
            Problem(f"{source.directory}, tensor {name}", "is missing: it is not in any file", self._fix_missing(name))
            for name in missing[:SHOWN]
        ]
        # Tensors that the weight table neither uses nor ignores.
        extra = sorted(names - set(self.by_hf))
        ignored = [name for name in extra if any(i.matches(name) for i in self.ignored)]
        expected = {*ignored, *self.kept(extra)}
        unmapped = [name for name in extra if name not in expected]
        problems += [
            Problem(
                f"{source.file(name)}, tensor {name}",
                (
                    f"is not in the weight table of {self.family.name} for this config.json "
                    f"({self.spec.num_layers} layers)"
                ),
            )
            for name in unmapped[:SHOWN]
        ]
        # Tensors with the wrong shape or dtype.
        wrong = [p for name in self.by_hf if name in names for p in self._wrong(source, name)]
        problems += wrong[:SHOWN]
        # Each kind shows a few; the rest are counted.
        unshown = sum(max(0, len(kind) - SHOWN) for kind in (missing, unmapped, wrong))
        if unshown:
            problems.append(Problem(str(source.directory), f"and {unshown} more tensors like these"))
        # A stored output layer must equal the embedding it is tied to. This reads data, so it comes last.
        if not problems and contents and self.spec.tied:
            problems += [p for name in ignored if TIED_HEAD.matches(name) for p in self._unequal(source, name)]
        if problems:
            raise WeightsError(problems)
        return ignored

    def _fix_missing(self, name: str) -> str:
        if name == "lm_head.weight":
            return "set tie_word_embeddings to true in config.json if the output layer is the embedding"
        if self.by_hf[name].entries[0].megatron.startswith("mtp."):
            return "leave out --mtp_num_layers: the folder was saved without layers for multi-token prediction"
        return ""

    def _wrong(self, source: WeightSource, name: str) -> Iterator[Problem]:
        what = f"{source.file(name)}, tensor {name}"
        shape = source.shape(name)
        if shape != self.hf_shapes[name]:
            yield Problem(what, f"has shape {list(shape)}, but config.json requires {list(self.hf_shapes[name])}")
        if source.dtype_name(name) not in FLOATS:
            yield Problem(
                what,
                f"has dtype {source.dtype_name(name)}; weights must be F32, BF16 or F16",
                "use the checkpoint in bfloat16",
            )

    def _unequal(self, source: WeightSource, head: str, rows: int = 4096) -> Iterator[Problem]:
        embedding = self.by_megatron[EMBEDDING].hf[0]
        same = source.shape(head) == source.shape(embedding)
        for row in range(0, self.spec.vocab_size, rows):
            if same:
                part = (slice(row, min(row + rows, self.spec.vocab_size)), slice(0, self.spec.hidden_size))
                same = torch.equal(source.slice(head, part), source.slice(embedding, part))
        if not same:
            yield Problem(
                f"{source.file(head)}, tensor {head}",
                f"differs from {embedding}, but config.json sets tie_word_embeddings",
                "set tie_word_embeddings to false to train both, or remove the tensor",
            )
