"""The files of a sharded checkpoint: boxes of named tensors, written and read in the torch_dist format.

Owns writing (each rank its own boxes, one file a rank, flushed to disk), what a read needs, and reading. The format is
that of Megatron-Core's `dist_checkpointing`, through `torch.distributed.checkpoint`: boxes may lie anywhere, so a flat
shard of the distributed optimizer needs no gather and any layout reads what it needs. Which boxes there are is not
here. The tables are read and checked by `dist_index`; tensors are read with `weights_only`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner
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
from megaswift.bridge.saved_dtype_compatibility import saved_dtype_problem
from megaswift.bridge.sharded_state_dict_entries import STATES
from megaswift.errors import ROOM, CheckpointError, Problem
from megaswift.families.checkpoint_folder import TABLES


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


class _Writer(dcp.FileSystemWriter):
    """Leaves the folder's path out of the tables: a checkpoint may be moved."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans the given boxes; the global plan's own checks (bounds, overlap, each tensor filled) are torch's."""

    def __init__(self, boxes: Iterable[RankTensorChunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {MetadataIndex(box.key, box.offset): box for box in boxes}

    def create_local_plan(self) -> dcp.SavePlan:
        items = []
        for index, box in self.boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(box.offset), box.data.shape)
            facts = planner.TensorWriteData(chunk, TensorProperties(box.data.dtype), torch.Size(box.whole))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=facts))
        self.plan = dcp.SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor:
        box = self.boxes[write_item.index]
        return box.data.detach() if box.read is None else box.read()


def dcp_save_rank_tensor_chunks(directory: Path, boxes: Sequence[RankTensorChunk]) -> None:
    """Every rank's boxes, on disk when this returns. Collective; CheckpointError on all ranks when one fails."""
    writer = _Writer(directory, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(boxes), process_group=distributed.cpu_group())
    except dcp.api.CheckpointException as error:
        reasons = sorted({f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()})
        raise CheckpointError(
            [Problem(str(directory), f"could not be written ({reason})", ROOM) for reason in reasons]
        ) from error


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
    """Of the item that holds it."""
    length: int


def write_checkpoint_metadata(directory: Path, saved: Iterable[SavedChunk]) -> None:
    """`.metadata`, metadata.json and common.pt for boxes that were written without `dcp_save_rank_tensor_chunks`."""
    tables: dict[str, TensorStorageMetadata] = {}
    places = {}
    for box in saved:
        corner = torch.Size(box.offset)
        table = tables.setdefault(
            box.key, TensorStorageMetadata(TensorProperties(box.dtype), torch.Size(box.whole), [])
        )
        table.chunks.append(ChunkStorageMetadata(corner, torch.Size(box.shape)))
        places[MetadataIndex(box.key, corner)] = _StorageInfo(box.file, box.start, box.length)
    index = Metadata(dict(tables), storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    with (directory / TABLES).open("wb") as file:
        pickle.dump(index, file)
    write_megatron_loader_files(directory)


def write_megatron_loader_files(directory: Path) -> list[Path]:
    """What Megatron-Core's own loader looks for beside the tables; never read here."""
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (directory / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")
    torch.save({}, directory / "common.pt")
    return [directory / "metadata.json", directory / "common.pt"]


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
    shape, size = tuple(box.whole), tuple(saved.size)
    return shape[1:] == size[1:] and len(shape) == len(size) if box.padded else shape == size


def plan_chunk_reads(index: Metadata, boxes: Sequence[RankTensorChunk]) -> tuple[list[planner.ReadItem], list[Problem]]:
    """What to read to fill `boxes`, and which of them the checkpoint cannot fill."""
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
