"""A Hugging Face folder into a sharded checkpoint (torch_dist) that Megatron loads on any layout. No model is built.

Owns which tensor lies where in the checkpoint's files and what else the folder gets:

    .metadata, __0_K.distcp     the weights, one item a parameter (an expert's slice of the stacked tensor)
    metadata.json, common.pt    what Megatron-Core's own loader looks for
    model/                      what turns it back into a Hugging Face folder (`checkpoint.hf_metadata`)
    conversion.json             vocabulary padding, layout it was checked for

For Megatron-LM (`megatron_lm`) the first two lie in the folder `release`, which latest_checkpointed_iteration.txt
names, and layers that are all alike are stacked in one tensor, as its default is.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.checkpoint import chunk_files, tensor_file
from megaswift.bridge.checkpoint.chunk_files import SavedChunk
from megaswift.bridge.checkpoint.entries import KEPT, ShardedStateDictEntry, sharded_state_dict_entry
from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.convert import job
from megaswift.bridge.convert.job import FolderJob, TensorJob, read_tensor_blocks, split_region_into_blocks
from megaswift.bridge.foreign.keys import LAYER
from megaswift.bridge.hf.dequantized import open_hf_weights
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.plan import PlanEntry, WeightPlan
from megaswift.errors import CheckpointError, LayoutError, Problem
from megaswift.families import family_of, load_spec
from megaswift.folders.checkpoint import MODEL, find_checkpoint
from megaswift.folders.foreign import CONVERSION, RELEASE, TRACKER, find_foreign_folder
from megaswift.models.spec import VOCABULARY, ModelSpec
from megaswift.models.stored_form import StoredForm
from megaswift.models.weights.gated_delta import KeyHeadRowsRule
from megaswift.models.weights.rules import TensorParallelShard, shard_dim
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.checks import layout_problems
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.model_shape import ModelShape
from megaswift.version import __version__

AXES = ("tp", "pp", "vpp", "ep", "etp")
"""The axes of a layout that cut weights."""
FILE_BYTES = 5_000_000_000
"""A file of the checkpoint is closed when it is so large."""


@dataclass(frozen=True)
class HfToMegatronOptions:
    """Options for writing a checkpoint."""

    layout: Mapping[str, int] = field(default_factory=dict)
    """Sizes of AXES that the checkpoint is meant for: checked against the model; the vocabulary is padded for this
    tp."""
    dtype: torch.dtype | None = None
    """One dtype for all tensors; None: each keeps its own."""
    file_bytes: int = FILE_BYTES
    overwrite: bool = False
    megatron_lm: bool = False
    """Write the folder that Megatron-LM loads, without the files of this program."""


def hf_to_megatron(
    source: Path | str, target: Path | str, options: HfToMegatronOptions = HfToMegatronOptions()
) -> Path:  # noqa: B008
    """Convert `source`; `target` appears whole or not at all."""
    folder = Path(source)
    target = Path(target)
    if find_checkpoint(folder) is not None:
        raise CheckpointError(
            Problem(
                str(folder),
                "is already a Megatron checkpoint",
                "run megaswift convert megatron-to-hf to convert it back",
            )
        )
    if find_foreign_folder(folder) is not None:
        fix = f"convert it first: megaswift convert megatron-to-hf {folder} DST --hf_config DIR"
        raise CheckpointError(Problem(str(folder), "is a checkpoint of another program", fix))
    # Check the source and the layout before anything is written.
    spec = load_spec(folder)
    plan = WeightPlan(family_of(spec.hf_config), spec)
    _check_layout(spec, options.layout)
    weights = open_hf_weights(folder)
    plan.check(weights)
    # Decide the bytes of every file: the job below writes them block by block, in bounded memory.
    padded = padded_vocabulary_size(spec, options.layout.get("tp", 1))
    dtypes = {name: options.dtype or weights.dtype(name) for name in plan.hf_shapes}
    arranged = _Arrangement(padded, options.file_bytes)
    if options.megatron_lm:
        _check_megatron_lm(plan)
        arranged = replace(arranged, folder=RELEASE, layers=_layers_of_stacks(spec), kept=False)
    saved, items, files = _arrange(plan, weights, dtypes, arranged)

    def finish_for_megatron_lm(stage: Path) -> None:
        common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"singleton_local_shards": False}}
        chunk_files.write_checkpoint_metadata(stage / RELEASE, saved, common)
        (stage / TRACKER).write_text(RELEASE, encoding="ascii")

    def finish(stage: Path) -> None:
        chunk_files.write_checkpoint_metadata(stage, saved)
        write_checkpoint_hf_metadata(stage / MODEL, spec.hf_config, dtypes, folder, StoredForm.of(spec.features))
        facts = {
            "megaswift": __version__,
            "family": spec.family,
            "padded_vocabulary": padded,
            "layout": dict(options.layout),
        }
        (stage / CONVERSION).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    # An interrupted conversion resumes only if all of this is unchanged.
    made_from = {
        "source": job.file_change_stamps([*{weights.file(n) for n in weights.names()}, folder / "config.json"], folder),
        "from": str(folder.resolve()),
        "dtype": str(options.dtype),
        "padded": padded,
        "files": files,
        "version": __version__,
    }
    ends = finish_for_megatron_lm if options.megatron_lm else finish
    return job.run_folder_job(FolderJob(target, files, items, ends, made_from, overwrite=options.overwrite))


def _check_megatron_lm(plan: WeightPlan) -> None:
    """Refuse models that Megatron-Core has under other names."""
    what = f"--format megatron-lm with a model of {plan.family.name}"
    if any(isinstance(entry.rule, KeyHeadRowsRule) for entry in plan.entries):
        raise CheckpointError(Problem(what, "Megatron-Core has gated delta nets under other names", "leave it out"))
    if plan.spec.head != VOCABULARY:
        raise CheckpointError(Problem(what, "has a head that Megatron-LM's GPT model lacks", "leave it out"))


def _layers_of_stacks(spec: ModelSpec) -> int:
    """Return the number of layers that share a tensor; 0 where layers differ and have names of their own."""
    return spec.num_layers if len({kind.scopes for kind in spec.layer_kinds}) == 1 else 0


def _check_layout(spec: ModelSpec, layout: Mapping[str, int]) -> None:
    if not layout:
        return
    tp, pp, vpp, ep, etp = (layout.get(axis, 1) for axis in AXES)
    processes = max(1, pp * math.lcm(tp, ep * etp))
    problems = layout_problems(ModelShape.of(spec), LayoutRequest(processes, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp))
    if problems:
        raise LayoutError(problems)


@dataclass(frozen=True)
class _Arrangement:
    """The destination of each tensor."""

    padded: int
    """Vocabulary rows."""
    file_bytes: int
    folder: str = "."
    """The files' folder within the target."""
    layers: int = 0
    """How many layers are stacked in one tensor; 0: none."""
    kept: bool = True
    """Whether tensors that do not train are carried along."""

    def region(self, entry: PlanEntry) -> ShardedStateDictEntry:
        """Return the region that a parameter occupies."""
        own = sharded_state_dict_entry(entry, self.padded)
        match = LAYER.fullmatch(own.key)
        if not self.layers or match is None:
            return own
        return ShardedStateDictEntry(
            f"{match['head']}{match['rest']}",
            (self.layers, *own.whole),
            (int(match["layer"]), *own.offset),
            (1, *own.shape),
        )


def _arrange(
    plan: WeightPlan, weights: WeightSource, dtypes: Mapping[str, torch.dtype], places: _Arrangement
) -> tuple[list[SavedChunk], list[TensorJob], dict[str, int]]:
    """Every tensor's place: the boxes for the tables, the items to write, the files' sizes."""
    key_dtypes = _key_dtypes(plan, dtypes, places)
    parts = []
    for entry in plan.entries:
        region = places.region(entry)
        content = functools.partial(read_megatron_parameter_in_blocks, entry, weights, places.padded)
        parts.append(
            (entry.hf[0], (region.key, region.whole, region.offset, region.shape, key_dtypes[region.key], content))
        )
    for name in plan.kept(weights.names()) if places.kept else ():
        shape = weights.shape(name)
        content = functools.partial(read_tensor_blocks, weights, name)
        parts.append((name, (KEPT + name, shape, (0,) * len(shape), shape, weights.dtype(name), content)))
    prefix = "" if places.folder == "." else f"{places.folder}/"
    saved: list[SavedChunk] = []
    items: list[TensorJob] = []
    files: dict[str, int] = {"__0_0.distcp": 0}
    for name, (key, whole, offset, shape, dtype, blocks) in parts:
        if files[[*files][-1]] >= places.file_bytes:
            files[f"__0_{len(files)}.distcp"] = 0
        file = [*files][-1]
        nbytes = math.prod(shape) * dtype.itemsize
        frame = tensor_file.torch_save_zip_frame(dtype, shape)
        start = files[file]
        length = len(frame.head) + nbytes + len(frame.tail)
        cast = functools.partial(_cast, blocks, dtype)
        items.append(TensorJob(f"{prefix}{file}", start, nbytes, cast, frame.head, frame.tail, name))
        saved.append(SavedChunk(key, whole, offset, shape, dtype, file, start, length))
        files[file] = start + length + -(start + length) % tensor_file.ALIGNMENT
    return saved, items, {f"{prefix}{file}": size for file, size in files.items()}


def _key_dtypes(plan: WeightPlan, dtypes: Mapping[str, torch.dtype], places: _Arrangement) -> dict[str, torch.dtype]:
    """Key -> the dtype that holds all its Hugging Face tensors' values: a named tensor has one dtype."""
    dtypes_of: dict[str, list[torch.dtype]] = defaultdict(list)
    for entry in plan.entries:
        dtypes_of[places.region(entry).key] += [dtypes[name] for name in entry.hf]
    return {key: functools.reduce(torch.promote_types, each) for key, each in dtypes_of.items()}


def _cast(blocks: functools.partial[Iterator[Tensor]], dtype: torch.dtype) -> Iterator[Tensor]:
    return (block.to(dtype).contiguous() for block in blocks())


def read_megatron_parameter_in_blocks(
    entry: PlanEntry, weights: WeightSource, padded_vocab: int | None
) -> Iterator[Tensor]:
    """Read a whole parameter in row-major order, in parts; at once where it is no row of ranges of rows (an expert's
    transposed matrix)."""
    pieces = entry.pieces(TensorParallelShard(1, 0, padded_vocab))
    dim = shard_dim(entry.rule)
    whole = len(pieces) == 1
    if any(p.transposed or p.stride != 1 or (dim and not whole) for p in pieces):
        yield entry.read(weights, 1, 0, padded_vocab)
        return
    for piece in pieces:
        name = entry.hf[piece.source]
        shape = entry.hf_shapes[piece.source]
        along = piece.hf_dim(dim)
        dtype = weights.dtype(name)
        spans = [(i, i + 1) for i in piece.at] + [(0, n) for n in shape[len(piece.at) :]]
        spans[along] = (min(piece.start, shape[along]), min(piece.stop, shape[along]))
        if spans[along][0] < spans[along][1]:
            yield from read_tensor_blocks(weights, name, spans)
        if piece.stop > shape[along]:
            rest = [(0, n) for n in shape]
            rest[along] = (0, piece.stop - max(piece.start, shape[along]))
            for where in split_region_into_blocks(rest, dtype.itemsize):
                yield torch.zeros([part.stop - part.start for part in where], dtype=dtype)
