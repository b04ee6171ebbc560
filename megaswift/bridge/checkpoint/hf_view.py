"""A sharded checkpoint, read by Hugging Face names.

Owns the way back through a family's weight table, slice by slice: of a tensor, only the part that is asked for is read,
wherever it lies in Megatron's arrangement. Half-precision runs keep float32 main weights; a tensor that goes out in a
wider dtype than its weights have comes from these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megaswift.bridge.adapters.plan import ADAPTER, SAVED
from megaswift.bridge.checkpoint import entries
from megaswift.bridge.checkpoint.entries import KEPT, MAIN, STATES
from megaswift.bridge.checkpoint.hf_metadata import read_original_tensor_dtypes
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.file_tensor import empty_releasable_tensor
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.hf.source import Slices, Span, slice_bounds_per_dim
from megaswift.bridge.plan import SHOWN, PlanEntry, WeightPlan
from megaswift.errors import CheckpointError, Problem
from megaswift.families import family_of, load_spec
from megaswift.folders.checkpoint import CheckpointTensorAndModelPaths
from megaswift.models.weights.rules import SliceMap, TensorParallelShard, shard_dim


class StoredTensors(Protocol):
    """Named tensors of a folder, read region by region."""

    @property
    def directory(self) -> Path:
        """The folder."""

    @property
    def bytes_read(self) -> int:
        """Bytes that were taken."""

    def keys(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""

    def file(self, key: str) -> Path:
        """Return the first file that holds a part of a tensor."""

    def missing(self, key: str) -> int:
        """Count the elements of a tensor that no file holds."""

    def region(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the part of `shape` at `offset` of a tensor, in its stored dtype."""

    def fill(self, key: str, offset: Sequence[int], out: Tensor) -> None:
        """Read the part at `offset` of a tensor into `out`, which has its shape and the stored dtype."""

    def close(self) -> None:
        """Close the files."""


class TensorDtypes(Protocol):
    """The dtype of each Hugging Face tensor."""

    def __getitem__(self, name: str) -> torch.dtype: ...


class MegatronSource:
    """The weights of a checkpoint as Hugging Face tensors: each in the dtype it once had, or all in `dtype`."""

    def __init__(
        self, plan: WeightPlan, tensors: StoredTensors, dtypes: TensorDtypes, dtype: torch.dtype | None = None
    ) -> None:
        self.plan = plan
        self.directory = tensors.directory
        self.tensors = tensors
        self._places = entries.sharded_state_dict_entries(self.plan.entries)
        self._had = dtypes
        self._wanted = dtype
        self._kept = [key.removeprefix(KEPT) for key in self.tensors.keys() if key.startswith(KEPT)]  # noqa: SIM118 (a method)
        self._copies = self.plan.copies
        self._check()

    @classmethod
    def open(cls, checkpoint: CheckpointTensorAndModelPaths, dtype: torch.dtype | None = None) -> MegatronSource:
        """Open a checkpoint of this program."""
        spec = load_spec(checkpoint.model)
        plan = WeightPlan(family_of(spec.hf_config), spec)
        return cls(plan, TorchDistSource(checkpoint.tensors), read_original_tensor_dtypes(checkpoint.model), dtype)

    def _check(self) -> None:
        """Every parameter of the model is there in full, and nothing else."""
        # A LoRA run's checkpoint has adapters instead of a model.
        stored = set(self.tensors.keys())
        if any(key.startswith((ADAPTER, SAVED)) for key in stored):
            adapter = self.directory.parent / "adapter"
            raise CheckpointError(
                Problem(
                    str(self.directory),
                    "contains the adapters of a LoRA run, not a model",
                    f"use the base model's folder with --adapters {adapter}",
                )
            )
        # Every tensor of the plan is stored once, in its shape. The vocabulary may be padded.
        problems = []
        seen = set()
        for entry in self.plan.entries:
            place = self._places[entry.megatron]
            if place.key in seen:
                continue
            seen.add(place.key)
            if place.key not in stored:
                problems.append(Problem(f"{self.directory}, tensor {place.key}", "is missing from the checkpoint"))
                continue
            shape = self.tensors.shape(place.key)
            what = f"{self.tensors.file(place.key)}, tensor {place.key}"
            padded = entry.shard == "vocab" and shape[1:] == place.whole[1:] and shape[0] >= place.whole[0]
            if shape != place.whole and not padded:
                problems.append(Problem(what, f"has shape {list(shape)}, but config.json requires {list(place.whole)}"))
            elif self.tensors.missing(place.key):
                problems.append(
                    Problem(what, f"is incomplete: {self.tensors.missing(place.key)} elements are not in any file")
                )
        # Nothing else is stored, apart from optimizer state and kept tensors.
        extra = sorted(key for key in stored if not key.startswith((STATES, KEPT)) and key not in seen)
        extra += [KEPT + name for name in set(self._kept) - set(self.plan.kept(self._kept))]
        rule = f"is not in the weight table of {self.plan.family.name} for this config.json"
        problems += [Problem(f"{self.tensors.file(key)}, tensor {key}", rule) for key in extra]
        if problems:
            more = (
                [Problem(str(self.directory), f"and {len(problems) - SHOWN} more tensors like these")]
                if len(problems) > SHOWN
                else []
            )
            raise CheckpointError(problems[:SHOWN] + more)

    @property
    def bytes_read(self) -> int:
        """Bytes that slices have taken."""
        return self.tensors.bytes_read

    def names(self) -> list[str]:
        """Return all tensors in the order of export; those carried along come last."""
        return [*self.plan.hf_shapes, *self._kept]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.plan.hf_shapes[name] if name in self.plan.hf_shapes else self.tensors.shape(KEPT + name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; what is carried along keeps its own."""
        return self._wanted or self._had[name] if name in self.plan.hf_shapes else self.tensors.dtype(KEPT + name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return DTYPE_NAMES[self.dtype(name)]

    def file(self, name: str) -> Path:
        """Return the first file that holds a part of a tensor."""
        is_kept = name not in self.plan.hf_shapes
        return self.tensors.file(
            KEPT + name if is_kept else self._places[self.plan.by_hf[name].entries[0].megatron].key
        )

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Read a part of a tensor into memory of its own. A copy of one of the model's tensors has its values."""
        if name in self._copies:
            return self.slice(self._copies[name], where).to(self.dtype(name))
        spans = slice_bounds_per_dim(where, self.shape(name))
        extent = [stop - start for start, stop in spans]
        if name not in self.plan.hf_shapes:
            return self.tensors.region(KEPT + name, [start for start, _ in spans], extent)
        out = empty_releasable_tensor(extent, self.dtype(name))
        covered = (
            sum(self._fill(out, spans, entry, piece, begin) for entry, piece, begin in self._pieces(name, spans))
            if out.numel()
            else 0
        )
        assert covered == out.numel(), f"{name}: {covered} of {out.numel()} elements were found"
        return out

    def _pieces(self, name: str, spans: Sequence[Span]) -> Iterator[tuple[PlanEntry, SliceMap, int]]:
        """Every piece of the tensor, with its first row or column in its parameter."""
        for entry in self.plan.by_hf[name].entries:
            begin = 0
            source = entry.hf.index(name)
            for piece in entry.pieces(TensorParallelShard()):
                if piece.source == source and all(
                    start <= i < stop for i, (start, stop) in zip(piece.at, spans, strict=False)
                ):
                    yield entry, piece, begin
                begin += piece.length

    def _fill(self, out: Tensor, spans: Sequence[Span], entry: PlanEntry, piece: SliceMap, begin: int) -> int:
        """Copy what a piece has of the region `spans` of its HF tensor into `out`; how many elements that is."""
        dim = shard_dim(entry.rule)
        lead = len(piece.at)
        target = out[tuple(i - start for i, (start, _) in zip(piece.at, spans, strict=False))]
        inner = spans[lead:]
        along = piece.hf_dim(dim) - lead
        low = max(inner[along][0], piece.start)
        high = min(inner[along][1], piece.stop)
        low += -(low - piece.start) % piece.stride
        if low >= high:
            return 0
        steps = (slice(None),) * along + (slice(low - inner[along][0], high - inner[along][0], piece.stride),)
        target = target[steps]
        corner = [start for start, _ in inner]
        extent = list(target.shape)
        corner[along] = begin + (low - piece.start) // piece.stride
        if piece.transposed:
            corner.reverse()
            extent.reverse()
        place = self._places[entry.megatron]
        expert = place.offset[: len(place.whole) - len(corner)]
        key = self._key(place.key, out.dtype)
        where = (*expert, *corner)
        shape = (*(1 for _ in expert), *extent)
        if target.is_contiguous() and not piece.transposed and self.tensors.dtype(key) == out.dtype:
            self.tensors.fill(key, where, target.view(shape))
        else:
            values = self.tensors.region(key, where, shape).view(extent)
            target.copy_(values.t() if piece.transposed else values)
        return target.numel()

    def _key(self, key: str, wanted: torch.dtype) -> str:
        """The weights themselves where they have this dtype already, else the main weights if there are any. Megatron's
        own checkpoints may have int16 remainders under that name, which are no weights."""
        main = self.tensors.dtype(key) != wanted and MAIN + key in self._mains
        return MAIN + key if main and self.tensors.dtype(MAIN + key).is_floating_point else key

    @functools.cached_property
    def _mains(self) -> set[str]:
        return {key for key in self.tensors.keys() if key.startswith(MAIN)}  # noqa: SIM118 (a method)

    def close(self) -> None:
        """Close the files."""
        self.tensors.close()
