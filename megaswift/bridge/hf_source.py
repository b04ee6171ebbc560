"""A Hugging Face folder of safetensors, read slice by slice.

Owns finding the shards, checking them before any weight is read, and reading parts of tensors. Which tensors a model needs is `plan`'s.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megaswift.bridge.file_tensor import FileTensor, OpenFiles
from megaswift.errors import Problem, WeightsError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}
HEADER_LIMIT = 100_000_000
"""Bytes; the safetensors library's own limit."""


Slices = Sequence[slice]


class TensorMeta(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """Where `Entry.read` takes its slices from."""

    def slice(self, name: str, where: Slices) -> Tensor:
        """A part of a tensor; dimensions not named are whole."""

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""


class WeightSource(TensorSource, Protocol):
    """All weights of a model, with what there is to know about each before it is read."""

    directory: Path

    @property
    def bytes_read(self) -> int:
        """What slices have taken since it was opened."""

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """A part of a tensor, or all of it."""

    def names(self) -> list[str]:
        """All tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype_name(self, name: str) -> str:
        """Its dtype as a file spells it."""

    def file(self, name: str) -> Path:
        """The file that holds it."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file."""


class HfSource:
    """The weights of one folder. Opening it reads headers only."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._files = OpenFiles()
        self._stored: dict[str, _Stored] = {}
        problems: list[Problem] = []
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._add(name, index, problems)
        if index is not None and not problems:
            problems += [Problem(str(self.directory / file), f"holds no tensor {name}, though {INDEX} says so")
                         for name, file in index.items() if name not in self._stored]
        if problems:
            raise WeightsError(problems)

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name; None where one file holds all."""
        path = self.directory / INDEX
        if not path.exists():
            if (self.directory / SINGLE).exists():
                return None
            others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
                            for p in self.directory.glob(pattern))
            found = f"; it holds {', '.join(others[:4])}" if others else ""
            raise WeightsError(Problem(str(self.directory), f"has no {SINGLE} and no {INDEX}{found}",
                                       "give a folder with a Hugging Face model in safetensors"))
        try:
            index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise WeightsError(Problem(str(path), f"is not an index of safetensors files: {error!r}")) from None
        if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
            raise WeightsError(Problem(str(path), "weight_map should map tensor names to file names"))
        return index

    def _inside(self, name: str) -> str | None:
        """What is wrong with a file name in the index; None when nothing is. A hub cache links its files to `blobs` beside it."""
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return "points outside its folder"
        folder, target = self.directory.resolve(), (self.directory / name).resolve()
        allowed = [folder] + ([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])
        if not any(target.is_relative_to(a) for a in allowed):
            return f"is a link to {target}, outside its folder"
        return None if target.is_file() else "is missing"

    def _add(self, name: str, index: dict[str, str] | None, problems: list[Problem]) -> None:
        """Read one file's header into the table."""
        path = self.directory / name
        outside = self._inside(name)
        if outside:
            here = sum(file == name for file in index.values()) if index else 0
            problems.append(Problem(str(path), outside + (f"; {INDEX} puts {here} tensors there" if index else "")))
            return
        try:
            header = read_header(path)
        except (OSError, ValueError) as error:
            problems.append(Problem(str(path), str(error), "download this file again"))
            return
        for tensor, (dtype, shape, start) in header.items():
            what = f"{path}, tensor {tensor}"
            if tensor in self._stored:
                problems.append(Problem(what, f"is also in {self._stored[tensor].file.name}"))
            elif index is not None and tensor not in index:
                problems.append(Problem(what, f"is not listed in {INDEX}"))
            self._stored.setdefault(tensor, _Stored(path, dtype, shape, start))

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._stored[name].shape

    def dtype_name(self, name: str) -> str:
        """Its dtype as the file spells it."""
        return self._stored[name].dtype_name

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return DTYPES[self._stored[name].dtype_name]

    def file(self, name: str) -> Path:
        """The file that holds it."""
        return self._stored[name].file

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """A part of a tensor, read into memory of its own."""
        stored = self._stored[name]
        spans = [w.indices(n) for w, n in zip((*where, *[slice(None)] * (len(stored.shape) - len(where))), stored.shape, strict=True)]
        assert all(step == 1 for _, _, step in spans), f"{name}: slices have no step"
        whole = FileTensor(stored.file, stored.start, DTYPES[stored.dtype_name], stored.shape)
        try:
            return self._files.region(whole, [start for start, _, _ in spans], [max(0, stop - start) for start, stop, _ in spans])
        except OSError as error:
            raise WeightsError(Problem(f"{stored.file}, tensor {name}", f"cannot be read: {error}")) from None

    @property
    def bytes_read(self) -> int:
        """What slices have taken since the folder was opened."""
        return self._files.bytes_read

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) != len(names) else set()
    if twice:
        raise ValueError(f"holds twice: {', '.join(sorted(twice))}")
    return dict(pairs)


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Tensor name -> (dtype, shape, first byte) of one safetensors file; a ValueError says what is wrong with the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise ValueError(f"is truncated or not a safetensors file ({size} bytes)")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not a safetensors file: {error}") from None
    found, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"has a damaged header at tensor {name}") from None
        if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"has {last - first} bytes for tensor {name} of shape {list(shape)} and dtype {dtype}")
        found[name], end = (dtype, shape, 8 + length + first), max(end, last)
    if size != 8 + length + end:
        raise ValueError(f"has {size} bytes where its header asks for {8 + length + end}: it is truncated or damaged")
    return found
