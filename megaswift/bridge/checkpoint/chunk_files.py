"""The files of a sharded checkpoint: boxes of named tensors, written and read in the torch_dist format.

Owns writing (each rank its own boxes, one file a rank, flushed to disk), what a read needs, and reading. The format is
that of Megatron-Core's `dist_checkpointing`, through `torch.distributed.checkpoint`: boxes may lie anywhere, so a flat
shard of the distributed optimizer needs no gather and any layout reads what it needs. Which boxes there are is not
here. The tables are read and checked by `read_torch_dist_metadata`; tensors are read with `weights_only`.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaswift import distributed
from megaswift.base.atomic_writes import FileEntry, HashedFile, write_hashed
from megaswift.bridge.checkpoint.dtypes import saved_dtype_problem
from megaswift.bridge.checkpoint.entries import KEPT, STATES
from megaswift.bridge.checkpoint.tensor_file import locate_torch_save_tensor
from megaswift.device_copy import HostBuffers
from megaswift.errors import ROOM, Problem
from megaswift.folders.checkpoint import TABLES

Entries = dict[str, FileEntry]
"""By the name of the file."""


@dataclass(frozen=True)
class RankTensorChunk:
    """A rank's part of a named tensor: `data` is the region of `data.shape` at `offset` of a tensor of shape
    `whole`."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    padded: bool = False
    """The first dimension is a vocabulary, padded as the layout needs: its length may differ, rows beyond it are
    zero."""
    read: Callable[[], Tensor] | None = None
    """Gives the content when it is written; `data` then tells shape and dtype only."""
    rounded: bool = False
    """A weight that is read from an optimizer's state: it may be rounded, which a state may not."""


@dataclass(frozen=True)
class SavedChunk:
    """A box that lies in a file already."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    start: int
    """The position of the item that holds it."""
    length: int


def copy_chunks_to_host(boxes: Iterable[RankTensorChunk]) -> list[RankTensorChunk]:
    """Copy the content of boxes to host memory.

    Boxes whose content lies in files that do not change are left as they are.

    What comes from a GPU goes to pinned chunks, and is put together when it is written, one box at a time: CUDA's
    allocator would round the memory of each tensor up to a power of two, and keep it.
    """
    copies: list[RankTensorChunk] = []
    buffers = HostBuffers()
    waits = False
    for box in boxes:
        if box.key.startswith(KEPT):
            copies.append(box)
            continue
        data = box.data.detach() if box.read is None else box.read()
        if not data.is_cuda:
            copies.append(replace(box, data=data.clone(memory_format=torch.contiguous_format), read=None))
            continue
        waits = True
        pieces = buffers.store(data.reshape(-1).view(torch.uint8))
        outline = torch.empty(data.shape, dtype=data.dtype, device="meta")
        copies.append(replace(box, data=outline, read=partial(_joined, pieces, outline)))
    if waits:
        torch.cuda.synchronize()
    return copies


def _joined(pieces: Sequence[Tensor], outline: Tensor) -> Tensor:
    """A tensor of the outline's dtype and shape from its bytes."""
    return torch.cat([*pieces]).view(outline.dtype).view(outline.shape)


def write_rank_chunks(directory: Path, rank: int, boxes: Iterable[RankTensorChunk]) -> tuple[list[SavedChunk], Entries]:
    """Write this rank's boxes to one file, which is on disk when this returns; return where each lies, and the file's
    entry. Not collective, and may run in any thread."""
    boxes = list(boxes)
    if not boxes:
        return [], {}
    name = f"__{rank}_0.distcp"
    saved = []
    with HashedFile(directory / name) as file:
        for box in boxes:
            data = (box.data.detach() if box.read is None else box.read()).cpu()
            if data.untyped_storage().nbytes() != data.numel() * data.element_size():
                data = data.clone()  # torch.save writes the whole storage of a view
            start = file.size
            _save_tensor(data, file)
            place = box.key, tuple(box.whole), tuple(box.offset), tuple(data.shape), data.dtype
            saved.append(SavedChunk(*place, name, start, file.size - start))
        return saved, {name: file.close_on_disk()}


def _save_tensor(tensor: Tensor, file: HashedFile) -> None:
    try:
        torch.save(tensor, cast(IO[bytes], file))
    except RuntimeError as error:  # torch's writer fails at its end too, where the file could not be written
        raise file.error or error from None


StatelessBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(weight, offset, shape): a box of a weight that is frozen, which the optimizer's states of that name leave out."""


def write_gathered_metadata(
    directory: Path, own: Sequence[SavedChunk], stateless: Sequence[StatelessBox] = ()
) -> Entries:
    """Write `.metadata` and what Megatron-Core's loader looks for, from the boxes of all ranks.

    Rank 0 writes them and returns their entries. Collective; CheckpointError where the boxes are not the whole of each
    tensor, but for what is `stateless` on any rank.
    """
    gathered = distributed.gather_on_rank0(([tuple(vars(box).values()) for box in own], list(stateless)))
    problems: list[Problem] = []
    entries: Entries = {}
    if gathered is not None:
        metadata = _metadata(SavedChunk(*box) for boxes, _ in gathered for box in boxes)
        whole = _with_stateless(metadata, [box for _, boxes in gathered for box in boxes])
        plans = [dcp.SavePlan([])] * len(gathered)  # their number is read: of several ranks tensors have to be whole
        problems = [Problem(str(directory), error) for error in _validate_global_plan(plans, whole)]
        try:
            entries = {} if problems else _write_tables(directory, metadata)
        except OSError as error:
            problems = [Problem(str(directory), f"could not be written ({error})", ROOM)]
    distributed.raise_on_all_ranks(problems, limit=12)
    return entries


def _with_stateless(metadata: Metadata, stateless: Sequence[StatelessBox]) -> Metadata:
    """The tables as if frozen weights had states, too."""
    boxes: dict[str, list[ChunkStorageMetadata]] = {}
    for weight, offset, shape in stateless:
        boxes.setdefault(weight, []).append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
    tables = dict(metadata.state_dict_metadata)
    for key, table in tables.items():
        weight = key.removeprefix(STATES).partition(".")[2] if key.startswith(STATES) else ""
        if weight in boxes and isinstance(table, TensorStorageMetadata):
            tables[key] = replace(table, chunks=[*table.chunks, *boxes[weight]])
    return Metadata(tables)


def dcp_save_rank_tensor_chunks(directory: Path, boxes: Sequence[RankTensorChunk]) -> Entries:
    """Write every rank's boxes, which are on disk when this returns; return the entries of this rank's files.
    Collective; CheckpointError on all ranks when one fails."""
    saved: list[SavedChunk] = []
    entries: Entries = {}
    problems = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        saved, entries = write_rank_chunks(directory, distributed.global_rank(), boxes)
    except OSError as error:
        problems = [Problem(str(directory), f"could not be written ({error})", ROOM)]
    distributed.raise_on_all_ranks(problems, limit=12)
    return entries | write_gathered_metadata(directory, saved)


def _metadata(saved: Iterable[SavedChunk]) -> Metadata:
    tables: dict[str, TensorStorageMetadata] = {}
    places = {}
    for box in saved:
        corner = torch.Size(box.offset)
        table = tables.setdefault(
            box.key, TensorStorageMetadata(TensorProperties(box.dtype), torch.Size(box.whole), [])
        )
        table.chunks.append(ChunkStorageMetadata(corner, torch.Size(box.shape)))
        places[MetadataIndex(box.key, corner)] = _StorageInfo(box.file, box.start, box.length)
    return Metadata(dict(tables), storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)


def _write_tables(directory: Path, metadata: Metadata, common: Mapping[str, Any] | None = None) -> Entries:
    """`.metadata` last: with it the folder counts as a checkpoint."""
    files = _megatron_loader_files(directory, common or {})
    entries = {path.name: write_hashed(path, content) for path, content in files}
    return entries | {TABLES: write_hashed(directory / TABLES, pickle.dumps(metadata))}


def write_checkpoint_metadata(
    directory: Path, saved: Iterable[SavedChunk], common: Mapping[str, Any] | None = None
) -> None:
    """Write `.metadata`, metadata.json and common.pt for boxes that were written without
    `dcp_save_rank_tensor_chunks`. `common`: what Megatron-LM reads from common.pt."""
    _write_tables(directory, _metadata(saved), common)


def _megatron_loader_files(directory: Path, values: Mapping[str, Any]) -> list[tuple[Path, bytes]]:
    """What Megatron-Core's own loader looks for beside the tables; never read here."""
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = io.BytesIO()
    torch.save(dict(values), common)
    return [
        (directory / "metadata.json", json.dumps(backends).encode()),
        (directory / "common.pt", common.getvalue()),
    ]


class _Filler(dcp.DefaultLoadPlanner):
    """Puts what is read where the boxes are."""

    def __init__(self, boxes: Sequence[RankTensorChunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = boxes

    def resolve_tensor(self, read_item: planner.ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        target = self.boxes[read_item.dest_index.index].data.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: planner.ReadItem, tensor: Tensor) -> None:
        pass


def _fits(box: RankTensorChunk, saved: TensorStorageMetadata) -> bool:
    shape = tuple(box.whole)
    size = tuple(saved.size)
    return shape[1:] == size[1:] and len(shape) == len(size) if box.padded else shape == size


def plan_chunk_reads(index: Metadata, boxes: Sequence[RankTensorChunk]) -> tuple[list[planner.ReadItem], list[Problem]]:
    """Return what to read to fill `boxes`, and which of them the checkpoint cannot fill."""
    items: list[planner.ReadItem] = []
    problems: dict[str, Problem] = {}
    for number, box in enumerate(boxes):
        saved = index.state_dict_metadata.get(box.key)
        if not isinstance(saved, TensorStorageMetadata):
            problems[box.key] = Problem(box.key, "is not in the checkpoint")
        elif not _fits(box, saved):
            problems[box.key] = Problem(
                box.key, f"has shape {list(saved.size)} in the checkpoint and {list(box.whole)} in this model"
            )
        elif other := saved_dtype_problem(
            box.key, saved.properties.dtype, box.data.dtype, box.key.startswith(STATES) and not box.rounded
        ):
            problems[box.key] = other
        else:
            rows = max(0, min(box.data.shape[0], saved.size[0] - box.offset[0]))
            shape = torch.Size((rows, *box.data.shape[1:]))
            chunk = ChunkStorageMetadata(torch.Size(box.offset), shape)
            read_items = create_read_items_for_chunk_list(box.key, saved, [chunk]) if rows else []
            if sum(math.prod(item.lengths) for item in read_items) != math.prod(shape):
                problems[box.key] = Problem(
                    box.key, f"is incomplete in the checkpoint: the part at {list(box.offset)} is missing"
                )
            items.extend(replace(item, dest_index=MetadataIndex(box.key, index=number)) for item in read_items)
    return items, list(problems.values())


def damaged_item_problems(directory: Path, index: Metadata, items: Iterable[planner.ReadItem]) -> list[Problem]:
    """Report the stored tensors of `items` that differ from the tables. Only their descriptions are read, so that
    torch.load meets none that it cannot read, or not in bounded time."""
    problems: dict[MetadataIndex, Problem] = {}
    seen: set[MetadataIndex] = set()
    for item in items:
        place = item.storage_index
        if place in seen:
            continue
        seen.add(place)
        info = index.storage_data[place]
        saved = index.state_dict_metadata[place.fqn]
        assert isinstance(saved, TensorStorageMetadata), "planned as a tensor"
        path = directory / info.relative_path
        try:
            stored = locate_torch_save_tensor(path, info.offset, info.length)
        except ValueError as error:
            problems[place] = Problem(str(path), f"{error}, where {place.fqn} should be", "use another step of the run")
            continue
        sizes = next((tuple(chunk.sizes) for chunk in saved.chunks if chunk.offsets == place.offset), None)
        if (stored.dtype, tuple(stored.shape)) != (saved.properties.dtype, sizes):
            rule = f"holds another tensor at byte {info.offset}, where the tables place {place.fqn}"
            problems[place] = Problem(str(path), rule, "use another step of the run")
    return list(problems.values())


def read_planned_chunks(
    directory: Path, index: Metadata, boxes: Sequence[RankTensorChunk], items: Sequence[planner.ReadItem]
) -> None:
    """Fills the boxes that `items` were planned for, in place; rows that a padded vocabulary has more than the saved
    one become zero."""
    for box in boxes:
        if box.padded:
            box.data.detach().zero_()
    reader = dcp.FileSystemReader(directory)
    reader.set_up_storage_reader(index, False)
    reader.read_data(dcp.LoadPlan(list(items)), _Filler(boxes)).wait()
