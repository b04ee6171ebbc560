"""The tables of a sharded checkpoint, `.metadata`: read so that no content of the file runs code, names a file outside
its folder, or takes memory or time out of proportion to its size.

Owns that. `.metadata` is a pickle in torch.distributed.checkpoint's format. Before it is unpickled its opcodes are
looked through: those that such tables need, with lengths that lie in the file. Then `_Tables` lets only the classes of
torch.distributed.checkpoint through, and every value is checked before anyone reads it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megaswift.base.plain_files import read_plain_file
from megaswift.bridge.checkpoint.pickle_scan import BROKEN, check_pickle_opcode_limits
from megaswift.bridge.hf.header import MOST_DIMENSIONS
from megaswift.errors import Problem
from megaswift.folders.checkpoint import TABLES as INDEX

LARGEST = 1 << 32
"""Bytes of the tables."""
MOST = 2**62
"""Elements of a tensor, bytes of a file."""
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_BROKEN = (*BROKEN, pickle.UnpicklingError)


class _Place:
    """Stands for a MetadataIndex until its fields are checked; hashed by identity."""

    fqn: object = None
    offset: object = None
    index: object = None

    def checked(self) -> MetadataIndex | None:
        """The key that it stands for; None where a field is of another type."""
        if type(self.fqn) is not str or not isinstance(self.offset, torch.Size | None):
            return None
        if self.index is not None and type(self.index) is not int:
            return None
        return MetadataIndex(self.fqn, self.offset, self.index)


def _size(numbers: object = ()) -> torch.Size:
    """A torch.Size of so few dimensions that its hash and its product take no time."""
    if not isinstance(numbers, tuple | list) or len(numbers) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError("contains a size of another form")
    return torch.Size(numbers)


def _enum_member(enum: object, name: object) -> _MEM_FORMAT_ENCODING:
    """Stand for `getattr`, by which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if enum is not _MEM_FORMAT_ENCODING or type(name) is not str or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("contains builtins.getattr of something other than a memory format")
    return _MEM_FORMAT_ENCODING[name]


class _Unread:
    """Stands for the plans of a save, which Megatron-Core keeps beside the tables and nothing here needs."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_REPLACED: dict[tuple[str, str], Any] = {
    (_METADATA, "MetadataIndex"): _Place,
    ("torch", "Size"): _size,
    ("builtins", "getattr"): _enum_member,
    **{(_PLANNER, name): _Unread for name in _PLANS},
    (_MEGATRON, "MCoreSavePlan"): _Unread,
    (_MEGATRON, "MCoreMetadata"): Metadata,
}


class _Tables(pickle.Unpickler):
    """Tables only: any other class or function in the file is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"contains {module}.{name}, which is not part of an index of torch.distributed.checkpoint"
        )


def read_torch_dist_metadata(directory: Path) -> Metadata | Problem:
    """Read the tables of a checkpoint, or return why there are none."""
    path = directory / INDEX
    try:
        data = read_plain_file(path, LARGEST)
        check_pickle_opcode_limits(data, {f"{_METADATA} MetadataIndex"})
        tables = _Tables(io.BytesIO(data)).load()
    except FileNotFoundError:
        return Problem(str(path), "is missing")
    except _BROKEN as error:
        return Problem(str(path), f"cannot be read ({error or type(error).__name__})")
    if not isinstance(tables, Metadata) or not getattr(tables, "storage_data", None):
        return Problem(str(path), "is not the index of a checkpoint")
    try:
        wrong = _wrong(tables)
    except _BROKEN as error:
        wrong = f"a value of another type ({error or type(error).__name__})"
    return Problem(str(path), f"is damaged: it has {wrong}") if wrong else tables


def _wrong(index: Metadata) -> str:
    """The first value that is not what such tables have there; empty if all are."""
    if not isinstance(index.state_dict_metadata, dict) or not isinstance(index.storage_data, dict):
        return "no tables of tensors and files"
    places: dict[MetadataIndex, _StorageInfo] = {}
    for place, info in index.storage_data.items():
        checked = place.checked() if isinstance(place, _Place) else None
        if checked is None or not _is_place(info):
            return f"an invalid storage entry for {_shown(getattr(place, 'fqn', place))}"
        places[checked] = info
    index.storage_data = places
    parts = Counter(place.fqn for place in places)
    for key, table in index.state_dict_metadata.items():
        if not isinstance(key, str):
            return f"{_shown(key)} as the name of a tensor"
        if isinstance(table, TensorStorageMetadata) and len(table.chunks) > parts[key]:
            return f"a chunk without a file for tensor {_shown(key)}"
        if isinstance(table, TensorStorageMetadata) and (wrong := _wrong_tensor(key, table, places)):
            return f"{wrong} for tensor {_shown(key)}"
    return ""


def _shown(value: object) -> str:
    """A text or number in a message; of what else a file may hold, the type: its text may have no end."""
    return repr(str(value)[:80]) if type(value) in (str, int) else type(value).__name__


def _is_place(info: object) -> bool:
    """A region of a file in the folder itself or below it."""
    if not isinstance(info, _StorageInfo) or not isinstance(info.relative_path, str) or not info.relative_path:
        return False
    inside = PurePosixPath(info.relative_path)
    if inside.is_absolute() or ".." in inside.parts or "\0" in info.relative_path or len(info.relative_path) > 4096:
        return False
    return _is_count(info.offset) and _is_count(info.length)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _wrong_tensor(key: str, table: TensorStorageMetadata, places: dict[MetadataIndex, Any]) -> str:
    if not isinstance(table.properties, TensorProperties) or not isinstance(table.properties.dtype, torch.dtype):
        return "no dtype"
    if not isinstance(table.size, torch.Size) or math.prod(max(1, n) for n in table.size) >= MOST:
        return "an impossible shape"
    if not table.chunks:
        return "no part"
    width = table.properties.dtype.itemsize
    for chunk in table.chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not _lies_within(chunk, table.size):
            return "a chunk outside of the tensor"
        info = places.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            return "a chunk without a file"
        chunk_bytes = math.prod(chunk.sizes) * width
        if not getattr(info, "transform_descriptors", None) and chunk_bytes > info.length:
            return f"a part of {chunk_bytes} bytes that is stored in {info.length} bytes of a file"
    return ""


def _lies_within(chunk: ChunkStorageMetadata, whole: torch.Size) -> bool:
    offsets = chunk.offsets
    sizes = chunk.sizes
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
        return False
    if len(offsets) != len(whole) or len(sizes) != len(whole):
        return False
    return all(a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(offsets, sizes, whole, strict=True))


def missing_or_short_file_problems(directory: Path, index: Metadata) -> list[Problem]:
    """Report files of the tables that are missing or too short."""
    need: dict[str, int] = {}
    for info in index.storage_data.values():
        need[info.relative_path] = max(need.get(info.relative_path, 0), info.offset + info.length)
    problems = []
    for name, size in sorted(need.items()):
        path = directory / name
        try:
            actual = path.stat().st_size if path.is_file() else None
        except OSError:  # a name that no file can have
            actual = None
        if actual is None:
            problems.append(Problem(str(path), "is missing"))
        elif actual < size:
            problems.append(Problem(str(path), f"is truncated: {actual} bytes, {size} expected"))
    return problems
