"""The legacy format of Megatron-LM: one file for each tensor, pipeline and expert rank, each with its part of the
model under the numbers that layers and experts have on that rank.

Owns the numbers of layers and experts in the whole model, and which rows of a parameter a rank's part holds, which
follows from the pieces of the parameter's rule. Files are read by `legacy_pickle`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.checkpoint.entries import ShardedStateDictEntry
from megaswift.bridge.file_tensor import FileTensor, OpenFileReader, empty_releasable_tensor
from megaswift.bridge.foreign.keys import NOT_WEIGHTS, PREFIX, Part, names_of
from megaswift.bridge.foreign.legacy_pickle import LegacyFile
from megaswift.bridge.plan import PlanEntry
from megaswift.errors import CheckpointError, Problem
from megaswift.folders.foreign import LEGACY_FILE, LEGACY_RANK
from megaswift.models.weights.rules import SliceMap, TensorParallelShard, shard_dim

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
"""The weights of Transformer Engine's grouped layers, of one expert each."""


@dataclass(frozen=True)
class _Rank:
    """The part of the model that a file holds."""

    folder: str
    tensor: int
    pipeline: int
    expert: int


class LegacyTensors:
    """`StoredTensors` of all files of an iteration, under names with the rank before them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = OpenFileReader()
        self._tensors: dict[str, FileTensor] = {}
        self.shards: dict[str, dict[int, list[str]]] = {}
        """Name with the numbers of layers and experts in the whole model -> tensor-parallel rank -> the same part in
        files of all ranks that have it."""
        ranks = self._ranks()
        opened = {rank: LegacyFile(directory / rank.folder / LEGACY_FILE) for rank in ranks}
        if problems := [*_missing_ranks(directory, ranks), *_different_chunks(opened)]:
            raise CheckpointError(problems)
        self.tp = 1 + max(rank.tensor for rank in ranks)
        first_layers = _first_layers(opened)
        experts = _local_experts(opened)
        etp = int(opened[ranks[0]].options.get("expert_tensor_parallel_size") or self.tp)
        self.etp = etp if 1 <= etp <= self.tp else 1
        for rank, file in opened.items():
            for number, chunk in enumerate(file.chunks):
                for name, tensor in chunk.items():
                    if NOT_WEIGHTS.fullmatch(name):
                        continue
                    key = f"{rank.folder}: {name}" if len(file.chunks) == 1 else f"{rank.folder}: model{number}.{name}"
                    try:
                        self._tensors[key] = file.located(tensor)
                    except ValueError as error:
                        what = f"{file.path}, tensor {name}"
                        raise CheckpointError(Problem(what, f"cannot be read: {error}")) from None
                    whole, expert = _whole_name(name, first_layers[rank.pipeline, number], rank.expert * experts)
                    shard = rank.tensor % self.etp if expert else rank.tensor
                    self.shards.setdefault(whole, {}).setdefault(shard, []).append(key)

    def _ranks(self) -> list[_Rank]:
        """The ranks whose folders are there. With two numbers the second is the pipeline's, or the expert's of a run
        without pipeline, as the options in the first file say."""
        found = sorted(path.name for path in self.directory.iterdir() if LEGACY_RANK.fullmatch(path.name))
        matches = [LEGACY_RANK.fullmatch(name) for name in found]
        two = [match for match in matches if match and match[2] and not match[3]]
        second_is_expert = False
        if two:
            options = LegacyFile(self.directory / found[0] / LEGACY_FILE).options
            stages = options.get("pipeline_model_parallel_size")
            if type(stages) is not int:
                rule = "has no options of its run (args), which say what the numbers in the folders' names mean"
                raise CheckpointError(Problem(str(self.directory / found[0] / LEGACY_FILE), rule))
            second_is_expert = stages == 1
        ranks = []
        for match in matches:
            assert match is not None
            second = int(match[2] or 0)
            stage, expert = (0, second) if second_is_expert else (second, int(match[3] or 0))
            ranks.append(_Rank(match[0], int(match[1]), stage, expert))
        return ranks

    @property
    def bytes_read(self) -> int:
        """Bytes that were taken."""
        return self.files.bytes_read

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[key].dtype

    def file(self, key: str) -> Path:
        """Return the file that holds a tensor."""
        return self._tensors[key].file

    def missing(self, key: str) -> int:
        """Return 0: a tensor lies in one file."""
        return 0

    def region(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the part of `shape` at `offset` of a tensor."""
        out = empty_releasable_tensor(shape, self.dtype(key))
        self.fill(key, offset, out)
        return out

    def fill(self, key: str, offset: Sequence[int], out: Tensor) -> None:
        """Read the part at `offset` of a tensor into `out`."""
        try:
            self.files.fill(self._tensors[key], offset, out)
        except OSError as error:
            raise CheckpointError(Problem(f"{self.file(key)}, tensor {key}", f"cannot be read: {error}")) from None

    def close(self) -> None:
        """Close the files."""
        self.files.close()


class LegacyKeys:
    """Finds parameters among the parts of all ranks."""

    def __init__(self, tensors: LegacyTensors) -> None:
        self.tensors = tensors
        self.names: Mapping[str, str] = {name: min(map(min, s.values())) for name, s in tensors.shards.items()}
        self.twice: Sequence[str] = ()
        self.used: set[str] = set()
        self._wrong: dict[str, list[tuple[str, str]]] = {}
        """First part of a parameter -> (stored tensor, what is wrong with it)."""

    def parts(self, entries: Sequence[PlanEntry], region: ShardedStateDictEntry) -> list[Part]:
        """Return the parts of a parameter, of all experts together; empty where one is missing."""
        found: list[Part] = []
        for entry in entries:
            name = next((each for each in names_of(entry.megatron) if each in self.tensors.shards), None)
            if name is None:
                return []
            self.used.add(self.names[name])
            found += self._of_entry(entry, self.tensors.shards[name])
        return found

    def _of_entry(self, entry: PlanEntry, shards: Mapping[int, Sequence[str]]) -> Iterator[Part]:
        """The parts of one parameter or expert: for each rank the ranges of its shard."""
        count = self.tensors.tp if entry.expert is None else self.tensors.etp
        if entry.shard == "replicated":
            count = 1
        dim = shard_dim(entry.rule)
        lead = () if entry.expert is None else (entry.expert,)
        keys = [shards[rank][0] if rank in shards else None for rank in range(count)]
        present = [key for key in keys if key is not None] or [min(map(min, shards.values()))]
        self._compare_copies(entry, present[0], shards)
        rows = sum(self.tensors.shape(key)[0] for key in present if self.tensors.shape(key))
        padded = max(rows, entry.spec.vocab_size) if entry.shard == "vocab" else None
        if padded is not None and padded % count:
            padded += count - padded % count
        needed = entry.shard_shape(count, padded)
        begins = _begins(entry, padded)
        for rank, key in enumerate(keys):
            if key is None:
                rule = f"is missing for tensor-parallel rank {rank} of {count}"
                self._wrong.setdefault(present[0], []).append((present[0], rule))
                continue
            offset = 0
            for piece in entry.pieces(TensorParallelShard(count, rank, padded)):
                for first, length, begin in _within(piece, begins):
                    corner = [0] * len(needed)
                    start = [0] * len(needed)
                    shape = list(needed)
                    corner[dim] = begin
                    start[dim] = offset + first
                    shape[dim] = length
                    yield Part(
                        key,
                        (*lead, *corner),
                        (*(1 for _ in lead), *shape),
                        needed,
                        (),
                        len(lead),
                        tuple(start),
                    )
                offset += piece.length

    def _compare_copies(self, entry: PlanEntry, key: str, shards: Mapping[int, Sequence[str]]) -> None:
        """Note copies of a part whose shape or dtype is another."""
        same = [[each for copies in shards.values() for each in copies]]
        for copies in same if entry.shard == "replicated" else shards.values():
            facts = [(self.tensors.shape(each), self.tensors.dtype(each)) for each in copies]
            for each, (shape, dtype) in zip(copies, facts, strict=True):
                if (shape, dtype) != facts[0]:
                    what = f"has shape {list(shape)} and dtype {str(dtype).removeprefix('torch.')}"
                    self._wrong.setdefault(key, []).append((each, f"{what}, its copy {copies[0]} others"))

    def wrong_shapes(self, parts: Sequence[Part], entry: PlanEntry) -> Iterator[tuple[str, str]]:
        """Yield (stored tensor, what is wrong with it)."""
        for part in parts:
            yield from self._wrong.get(part.key, ())
            shape = self.tensors.shape(part.key)
            if shape != part.needed:
                yield part.key, f"has shape {list(shape)}, but config.json requires {list(part.needed)} of this rank"

    def missing_rule(self, key: str) -> str:
        """Say that a parameter is not stored."""
        return "is missing from the checkpoint"


def _begins(entry: PlanEntry, padded: int | None) -> list[tuple[SliceMap, int]]:
    """The pieces of the whole parameter, with the first row or column of each."""
    begins = []
    position = 0
    for piece in entry.pieces(TensorParallelShard(1, 0, padded)):
        begins.append((piece, position))
        position += piece.length
    return begins


def _within(piece: SliceMap, begins: Sequence[tuple[SliceMap, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (first row of the piece, rows, first row of the parameter) for each piece of the whole that this one lies
    in."""
    for whole, begin in begins:
        if (whole.source, whole.at, whole.stride) != (piece.source, piece.at, piece.stride):
            continue
        if (piece.start - whole.start) % piece.stride:
            continue
        low = max(piece.start, whole.start)
        high = min(piece.stop, whole.stop)
        if low < high:
            rows = -(-(high - low) // piece.stride)
            yield (low - piece.start) // piece.stride, rows, begin + (low - whole.start) // piece.stride


def _missing_ranks(directory: Path, ranks: Sequence[_Rank]) -> Iterator[Problem]:
    """Tensor and pipeline ranks of which no folder is there."""
    have = {(rank.tensor, rank.pipeline) for rank in ranks}
    tensor, stage = (1 + max(getattr(rank, name) for rank in ranks) for name in ("tensor", "pipeline"))
    for t in range(tensor):
        for p in range(stage):
            if (t, p) not in have:
                yield Problem(str(directory), f"has no folder of tensor rank {t} and pipeline rank {p}")
    experts = {(rank.expert, rank.pipeline) for rank in ranks}
    for e in range(1 + max(rank.expert for rank in ranks)):
        for p in range(stage):
            if (e, p) not in experts:
                yield Problem(str(directory), f"has no folder of expert rank {e} and pipeline rank {p}")


def _different_chunks(opened: Mapping[_Rank, LegacyFile]) -> Iterator[Problem]:
    """Files with another number of chunks, or of another layout than the folders."""
    first = next(iter(opened.values()))
    for file in opened.values():
        if len(file.chunks) != len(first.chunks):
            yield Problem(str(file.path), f"has {len(file.chunks)} parts of a model, {first.path} {len(first.chunks)}")
    sizes = {
        "tensor_model_parallel_size": 1 + max(rank.tensor for rank in opened),
        "pipeline_model_parallel_size": 1 + max(rank.pipeline for rank in opened),
        "expert_model_parallel_size": 1 + max(rank.expert for rank in opened),
    }
    for name, found in sizes.items():
        wanted: Any = first.options.get(name, found)
        if wanted is not None and wanted != found:
            rule = f"says {name} {wanted!s:.20}, but the folders are those of {found}"
            yield Problem(str(first.path), rule, "use a complete copy of the checkpoint")


def _first_layers(opened: Mapping[_Rank, LegacyFile]) -> dict[tuple[int, int], int]:
    """(pipeline rank, chunk) -> the number of its first layer: chunk by chunk, in each from stage to stage."""
    counts: dict[tuple[int, int], int] = {}
    for rank, file in opened.items():
        for number, chunk in enumerate(file.chunks):
            layers = [int(match[1]) for name in chunk if (match := _LAYER.fullmatch(PREFIX.sub("", name)))]
            counts[rank.pipeline, number] = max(counts.get((rank.pipeline, number), 0), *(n + 1 for n in layers), 0)
    firsts = {}
    total = 0
    for stage, number in sorted(counts, key=lambda each: (each[1], each[0])):
        firsts[stage, number] = total
        total += counts[stage, number]
    return firsts


def _local_experts(opened: Mapping[_Rank, LegacyFile]) -> int:
    """Return the number of experts in a file."""
    numbers = [0]
    for file in opened.values():
        for name in (name for chunk in file.chunks for name in chunk):
            if (match := _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name)) is not None:
                numbers.append(1 + int(match[2]))
    return max(numbers)


def _whole_name(name: str, first_layer: int, first_expert: int) -> tuple[str, bool]:
    """A name with the numbers of the whole model, and whether it is an expert's."""
    name = PREFIX.sub("", name)
    if (match := _LAYER.fullmatch(name)) is not None:
        name = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}"
    if (match := _EXPERT.fullmatch(name)) is not None:
        return f"{match[1]}{int(match[2]) + first_expert}.{match[3]}", True
    if (match := _GROUPED.fullmatch(name)) is not None:
        home, _, rest = match[1].rpartition(".experts.")
        return f"{home}.experts.{int(match[2]) + first_expert}.{rest}", True
    return name, False
