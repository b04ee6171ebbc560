"""A Hugging Face folder of safetensors, read slice by slice.

Owns finding the shards, checking them before any weight is read, and reading parts of tensors.
`bridge.plan` decides which tensors a model needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megaswift.base.plain_files import outside_link_rule, read_plain_file
from megaswift.bridge.file_tensor import FileTensor, OpenFileReader
from megaswift.bridge.hf.header import (
    DTYPES,
    DamagedHeader,
    HeaderEntry,
    read_safetensors_header,
    reject_duplicate_keys,
)
from megaswift.errors import Problem, WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Slices = Sequence[slice]
Span = tuple[int, int]
"""[start, stop) of one dimension."""


def slice_bounds_per_dim(where: Slices, shape: Sequence[int]) -> list[Span]:
    """Return the region of a tensor that slices without steps take; dimensions not named are whole."""
    indices = [w.indices(n) for w, n in zip((*where, *[slice(None)] * (len(shape) - len(where))), shape, strict=True)]
    assert all(step == 1 for _, _, step in indices), "slices have no step"
    return [(start, max(start, stop)) for start, stop, _ in indices]


class TensorMeta(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """A set of named tensors that is read slice by slice."""

    def slice(self, name: str, where: Slices) -> Tensor:
        """Return a part of a tensor; dimensions not named are whole."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""


class WeightSource(TensorSource, Protocol):
    """All weights of a model, with what there is to know about each before it is read."""

    directory: Path

    @property
    def bytes_read(self) -> int:
        """What slices have taken since it was opened."""

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Return a part of a tensor, or all of it."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""

    def close(self) -> None:
        """Close the files."""


def _listed(name: str, index: dict[str, str] | None) -> str:
    """Which tensors a file should hold by its index, for a message about the file: the first ones by name."""
    names = [tensor for tensor, file in (index or {}).items() if file == name]
    if not names:
        return ""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"; {INDEX} lists {', '.join(names[:2])}{more} there"


class HfSource:
    """The weights of one folder. Opening it reads headers only."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._files = OpenFileReader()
        self._stored: dict[str, HeaderEntry] = {}
        self._file_of: dict[str, Path] = {}
        problems: list[Problem] = []
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._add(name, index, problems)
        if index is not None and not problems:
            problems += [
                Problem(str(self.directory / file), f"has no tensor {name}, but {INDEX} lists it there")
                for name, file in index.items()
                if name not in self._stored
            ]
        if problems:
            raise WeightsError(problems)

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name; None where one file holds all."""
        path = self.directory / INDEX
        if not path.exists():
            if (self.directory / SINGLE).exists():
                return None
            others = sorted(
                p.name
                for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
                for p in self.directory.glob(pattern)
            )
            contents = f"; it holds {', '.join(others[:4])}" if others else ""
            raise WeightsError(
                Problem(
                    str(self.directory),
                    f"has no {SINGLE} and no {INDEX}{contents}",
                    "give a folder with a Hugging Face model in safetensors",
                )
            )
        try:
            text = read_plain_file(path).decode("utf-8")
            index = json.loads(text, object_pairs_hook=reject_duplicate_keys)["weight_map"]
        except DamagedHeader as error:
            raise WeightsError(Problem(str(path), str(error))) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsError(Problem(str(path), f"is not an index of safetensors files: {error!r}")) from None
        if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
            raise WeightsError(Problem(str(path), "weight_map must map tensor names to file names"))
        if SINGLE not in index.values() and (self.directory / SINGLE).exists():
            raise WeightsError(
                Problem(
                    str(self.directory),
                    f"has both {SINGLE}, which transformers would read, and {INDEX}, which does not list it: these may "
                    "be two different models",
                    "remove the one that you do not need",
                )
            )
        return index

    def _inside(self, name: str) -> str | None:
        """What is wrong with a file name in the index; None when nothing is. A hub cache links its files to `blobs`
        beside it."""
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return "points outside its folder"
        path = self.directory / name
        if outside := outside_link_rule(self.directory, path):
            return outside
        try:
            return None if path.is_file() else "is missing"
        except (OSError, ValueError) as error:  # a name that is too long
            return f"is not a file name ({error})"

    def _add(self, name: str, index: dict[str, str] | None, problems: list[Problem]) -> None:
        """Read one file's header into the table."""
        path = self.directory / name
        outside = self._inside(name)
        if outside:
            problems.append(Problem(str(path), outside + _listed(name, index)))
            return
        try:
            header = read_safetensors_header(path)
        except (OSError, ValueError) as error:
            problems.append(Problem(str(path), str(error) + _listed(name, index), "download this file again"))
            return
        for tensor, stored in header.items():
            what = f"{path}, tensor {tensor}"
            if tensor in self._stored:
                problems.append(Problem(what, f"is also in {self._file_of[tensor].name}"))
            elif index is not None and tensor not in index:
                problems.append(Problem(what, f"is not listed in {INDEX}"))
            self._stored.setdefault(tensor, stored)
            self._file_of.setdefault(tensor, path)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors by other names than the files do; `names`: stored name -> name."""
        self._stored = {names.get(name, name): stored for name, stored in self._stored.items()}
        self._file_of = {names.get(name, name): path for name, path in self._file_of.items()}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored[name].shape

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return self._stored[name].dtype

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        spelled = self._stored[name].dtype
        if spelled not in DTYPES:
            raise WeightsError(
                Problem(
                    f"{self.file(name)}, tensor {name}",
                    f"has dtype {spelled}, which cannot be read",
                    "use the checkpoint in bfloat16",
                )
            )
        return DTYPES[spelled]

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Read a part of a tensor into memory of its own."""
        stored = self._stored[name]
        spans = slice_bounds_per_dim(where, stored.shape)
        tensor = FileTensor(self.file(name), stored.start, self.dtype(name), stored.shape)
        try:
            return self._files.region(tensor, [start for start, _ in spans], [stop - start for start, stop in spans])
        except OSError as error:
            raise WeightsError(Problem(f"{self.file(name)}, tensor {name}", f"cannot be read: {error}")) from None

    @property
    def bytes_read(self) -> int:
        """What slices have taken since the folder was opened."""
        return self._files.bytes_read

    def close(self) -> None:
        """Close the files."""
        self._files.close()
