"""Reads a legacy checkpoint's pickle without running anything that it names.

The exception to the rule that no pickle is read for its weights: Megatron-LM's `model_optim_rng.pt` has no other
table. Only `megaswift convert` comes here. The Unpickler has functions of this module in the place of everything that
the file may name: tensors become places in the file, `argparse.Namespace` a plain one, numpy scalars numbers. Objects
of Megatron's own classes become marks without content, since its files are full of enums. Any other name ends the
reading before anything is called. No name is ever imported.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaswift.bridge.checkpoint.pickle_scan import BROKEN, check_pickle_opcode_limits
from megaswift.bridge.checkpoint.tensor_file import STORAGE_DTYPES
from megaswift.bridge.file_tensor import FileTensor
from megaswift.bridge.hf.header import MOST_DIMENSIONS
from megaswift.errors import CheckpointError, Problem

LARGEST = 1 << 30
"""Bytes of the description of a file."""
MARKED = ("megatron.", "transformer_engine.")
"""Packages whose objects become marks."""
_BROKEN = (*BROKEN, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)
_NUMPY_FORMATS = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}


class Mark:
    """Stands for an object that is not read."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Takes an item of a list that is not read."""

    def extend(self, values: object) -> None:
        """Takes items of a list that is not read."""


class _Named(dict[str, Any]):
    """Stands for an OrderedDict; what the file sets on it besides its items is dropped."""

    def __init__(self, *pairs: object) -> None:
        if pairs and pairs != ((),) and pairs != ([],):
            raise pickle.UnpicklingError("contains a dictionary of another form")
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass


class _Options(Namespace):
    """A Namespace whose values are what the file says."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or not all(type(name) is str for name in state):
            raise pickle.UnpicklingError("contains a Namespace of another form")
        vars(self).update(state)


class _NumpyType:
    """A numpy dtype: its format and its byte order."""

    def __init__(self, text: object = "", *_: object) -> None:
        self.format = _NUMPY_FORMATS.get(text, "") if type(text) is str else ""
        self.order = "<"

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = "<" if state[1] in ("|", "=") else str(state[1])


@dataclass(frozen=True)
class _Storage:
    """The bytes of tensors."""

    key: str
    dtype: torch.dtype | None
    """None: of the tensor's own."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as the file describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dense(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        rows = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, rows, strict=True))


def _tensor(storage: object, offset: object, shape: object, strides: object, *more: object) -> PickledTensor:
    """Stands for torch's `_rebuild_tensor_v2` and `_rebuild_tensor_v3`, whose last argument is a dtype."""
    dtype = next((each for each in more if isinstance(each, torch.dtype)), None)
    numbers_are_given = isinstance(shape, tuple) and isinstance(strides, tuple) and isinstance(storage, _Storage)
    if not numbers_are_given:
        raise pickle.UnpicklingError("describes a tensor by values of another type")
    assert isinstance(shape, tuple) and isinstance(strides, tuple) and isinstance(storage, _Storage)
    kind = storage.dtype or dtype
    numbers = (*shape, *strides, offset)
    if (
        kind is None
        or len(shape) != len(strides)
        or len(shape) > MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    ):
        raise pickle.UnpicklingError("describes a tensor by invalid sizes")
    assert isinstance(offset, int)
    return PickledTensor(storage, offset, shape, strides, kind)


def _parameter(data: object, *_: object) -> object:
    return data


def _size(numbers: object = ()) -> tuple[object, ...]:
    if not isinstance(numbers, tuple | list) or len(numbers) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError("contains a size of another form")
    return tuple(numbers)


def _encoded(text: object, encoding: object = "") -> bytes:
    """Stands for `_codecs.encode`, by which protocol 2 writes bytes."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("contains bytes of another form")
    return text.encode("latin1")


def _scalar(kind: object, data: object = b"") -> object:
    """Stands for numpy's constructor of scalars."""
    if not isinstance(kind, _NumpyType) or not kind.format or type(data) is not bytes:
        raise pickle.UnpicklingError("contains a numpy scalar of another type")
    form = kind.order + kind.format
    if len(data) != struct.calcsize(form):
        raise pickle.UnpicklingError("contains a numpy scalar of another size")
    return struct.unpack(form, data)[0]


def _member(owner: object, name: object) -> Mark:
    """Stand for `getattr`, by which some releases of Python pickle the members of an enum."""
    if owner is not Mark or type(name) is not str:
        raise pickle.UnpicklingError("contains builtins.getattr of something other than an enum")
    return Mark()


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGE_NAMES = {kind.__name__: dtype for dtype, kind in STORAGE_DTYPES.items()}
_REPLACED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _Named,
    ("argparse", "Namespace"): _Options,
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _NumpyType,
    **{
        (f"{module}.multiarray", name): value
        for module in ("numpy.core", "numpy._core")
        for name, value in (("scalar", _scalar), ("_reconstruct", Mark))
    },
    ("numpy", "ndarray"): Mark,
    ("_io", "BytesIO"): Mark,
    ("signal", "Signals"): Mark,
    **{(module, "set"): Mark for module in ("builtins", "__builtin__")},
    **{(module, "getattr"): _member for module in ("builtins", "__builtin__")},
}
"""Everything that a file may name, with what takes its place."""


class _Reader(pickle.Unpickler):
    """Reads a file's description; any other name in it is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        if module == "torch" and name in _STORAGE_NAMES:
            return _Storage("", _STORAGE_NAMES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Storage("", None)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module.startswith(MARKED) or module + "." in MARKED:
            return Mark
        raise pickle.UnpicklingError(f"contains {module}.{name}, which is not part of a checkpoint's weights")

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("contains a reference of another form")
        kind = pid[1]
        key = pid[2]
        if not isinstance(kind, _Storage) or type(key) is not str:
            raise pickle.UnpicklingError("contains a storage of another form")
        return _Storage(key, kind.dtype)


class LegacyFile:
    """One `model_optim_rng.pt`: its options, and its tensors by the names of the model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
        except _BROKEN as error:
            what = str(error) or type(error).__name__
            raise CheckpointError(Problem(str(path), f"cannot be read: {what}")) from None

    def _open(self) -> None:
        with self.path.open("rb") as file:
            if file.read(2) != b"PK":
                raise ValueError("it is not a zip archive of torch.save (of PyTorch 1.6 or later)")
            with zipfile.ZipFile(file) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if len(records) != len(archive.infolist()):
                    raise ValueError("it has a record twice")
                if "data.pkl" not in records:
                    raise ValueError("it has no record data.pkl")
                if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                    raise ValueError("its byte order is not little")
                packed = [name for name, info in records.items() if info.compress_type != zipfile.ZIP_STORED]
                if packed:
                    raise ValueError(f"its record {packed[0]} is compressed")
                if records["data.pkl"].file_size > LARGEST:
                    raise ValueError(f"its description is larger than {LARGEST:,} bytes")
                description = archive.read(records["data.pkl"])
            self._starts: dict[str, tuple[int, int]] = {}
            for name, info in records.items():
                if name.startswith("data/"):
                    file.seek(info.header_offset + 26)
                    lengths = struct.unpack("<HH", file.read(4))
                    self._starts[name.removeprefix("data/")] = info.header_offset + 30 + sum(lengths), info.file_size
        check_pickle_opcode_limits(description)
        state = _Reader(io.BytesIO(description)).load()
        if not isinstance(state, dict):
            raise ValueError("it holds no dictionary")
        self.options: Mapping[str, Any] = {}
        if isinstance(state.get("args"), _Options):
            self.options = vars(state["args"])
        self.chunks: list[dict[str, PickledTensor]] = []
        """Tensors of the model's chunks by name: one, or one for each virtual pipeline stage."""
        chunks = ["model"] if "model" in state else []
        while f"model{len(chunks)}" in state:
            chunks.append(f"model{len(chunks)}")
        for name in chunks:
            values = state[name]
            if not isinstance(values, dict):
                raise ValueError(f"its entry {name} is no dictionary")
            if "language_model" in values:
                raise ValueError("its model is one from before Megatron-Core, with other names")
            self.chunks.append({key: value for key, value in values.items() if isinstance(value, PickledTensor)})
        if not self.chunks:
            raise ValueError("it has no entry model")

    def located(self, tensor: PickledTensor) -> FileTensor:
        """Locate a tensor's bytes; a ValueError explains why they cannot be read."""
        if tensor.storage.key not in self._starts:
            raise ValueError(f"its storage {tensor.storage.key!r:.20} is not in the file")
        first, length = self._starts[tensor.storage.key]
        width = tensor.dtype.itemsize
        if not tensor.dense:
            raise ValueError("it is not in row-major order")
        if (tensor.offset + math.prod(tensor.shape)) * width > length:
            raise ValueError(f"it has {math.prod(tensor.shape) * width} bytes, its storage {length}")
        return FileTensor(self.path, first + tensor.offset * width, tensor.dtype, tensor.shape)
