"""One tensor as `torch.save` writes it: a zip archive whose record `data/0` is the tensor's bytes.

Owns the frame around these bytes, so that they can be written and read without the archive in memory. It writes the
records that `torch.load` requires. The tensor's checksum stays zero: torch never checks it, and can omit it itself
(`torch.serialization.set_crc32_options`).
Reading unpickles the tensor's description only, by an Unpickler that calls nothing, after a look at its opcodes.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.storage import UntypedStorage

from megaswift.bridge.checkpoint.pickle_scan import BROKEN, check_pickle_opcode_limits
from megaswift.bridge.file_tensor import FileTensor
from megaswift.bridge.hf.header import MOST_DIMENSIONS

ALIGNMENT = 64
"""The alignment of the tensor's bytes within an item, as torch has it."""
STORAGE_DTYPES: dict[torch.dtype, type] = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_LARGE = 0xFFFFFFFF
"""From this many bytes on a record's size stands in its 64 bit field."""
_BROKEN = (*BROKEN, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)


class _Bytes:
    """Stands for the storage in a description that is being written."""


class _Described:
    """Pickles as torch's own call that makes a tensor from a storage."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        facts: tuple[Any, ...] = (_Bytes(), 0, self.shape, strides, False, collections.OrderedDict())
        if self.dtype in STORAGE_DTYPES:
            return torch._utils._rebuild_tensor_v2, facts
        return torch._utils._rebuild_tensor_v3, (*facts, self.dtype)


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    typed = STORAGE_DTYPES.get(dtype)
    count = math.prod(shape) * (1 if typed else dtype.itemsize)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", typed or UntypedStorage, "0", "cpu", count) if isinstance(obj, _Bytes) else None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(_Described(dtype, shape))
    return out.getvalue()


class ZipBytesAroundTensor(NamedTuple):
    """What stands before and after a tensor's bytes."""

    head: bytes
    tail: bytes


def torch_save_zip_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> ZipBytesAroundTensor:
    """Return the archive without the tensor's bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    head = bytearray()
    central = bytearray()
    for name, content in (
        ("data.pkl", _description(dtype, shape)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
        ("data/0", None),
    ):
        full = f"archive/{name}".encode()
        size = nbytes if content is None else len(content)
        wide = size >= _LARGE
        extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
        if content is None:  # an extra field of zeros moves the bytes to the alignment
            start = len(head) + 30 + len(full) + len(extra) + 4
            extra += struct.pack("<HH", 0x4246, -start % ALIGNMENT) + bytes(-start % ALIGNMENT)
        position = len(head)
        visible = min(size, _LARGE)
        needs = 45 if wide else 20
        checksum = zlib.crc32(content or b"")
        common = struct.pack("<HHHHHIIIHH", needs, 0x800, 0, 0, 0, checksum, visible, visible, len(full), len(extra))
        head += b"PK\3\4" + common + full + extra + (content or b"")
        extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
        common = common[:-2] + struct.pack("<H", len(extra))
        central += (
            b"PK\1\2" + struct.pack("<H", 45) + common + struct.pack("<HHHII", 0, 0, 0, 0, position) + full + extra
        )
    begin = len(head) + nbytes
    records = 4
    end64 = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, records, records, len(central), begin)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, begin + len(central), 1)
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, records, records, len(central), min(begin, _LARGE), 0)
    return ZipBytesAroundTensor(bytes(head), bytes(central + end64 + locator + end))


class _Part(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}
        self.at = origins[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, target: Any) -> int:
        self.file.seek(self.start + self.at)
        content = self.file.read(max(0, min(len(target), self.length - self.at)))
        target[: len(content)] = content
        self.at += len(content)
        return len(content)


def _no_hooks() -> None:
    """Stands for the empty OrderedDict of a tensor's hooks; with entries it would hash what a file holds."""


class _Facts(pickle.Unpickler):
    """Reads a description into (storage, offset, shape, strides, dtype); any other content is refused before it is
    called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda storage, offset, shape, strides, _, hooks, dtype=None: (
                storage,
                offset,
                shape,
                strides,
                dtype,
            )
        if (module, name) == ("collections", "OrderedDict"):
            return _no_hooks
        resolved = None
        if module == "torch":
            resolved = getattr(torch, name, None)
        elif name == "UntypedStorage":
            resolved = UntypedStorage
        if isinstance(resolved, torch.dtype) or resolved is UntypedStorage or resolved in STORAGE_DTYPES.values():
            return resolved
        raise pickle.UnpicklingError(f"contains {module}.{name}, which is not part of a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def locate_torch_save_tensor(path: Path, start: int, length: int) -> FileTensor:
    """Locate the bytes of the item at `start`; a ValueError explains why they cannot be read."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(io.BufferedReader(_Part(file, start, length))) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(entries) != len(archive.infolist()):
                raise ValueError("has a record twice")
            record = entries["data/0"]
            if any(info.compress_type != zipfile.ZIP_STORED for info in (record, entries["data.pkl"])):
                raise ValueError("is compressed")
            file.seek(_content(file, start + entries["data.pkl"].header_offset))
            description = file.read(min(entries["data.pkl"].file_size, length))
            check_pickle_opcode_limits(description)
            storage, offset, shape, strides, dtype = _Facts(io.BytesIO(description)).load()
            first = _content(file, start + record.header_offset)
        kind = next((k for k, v in STORAGE_DTYPES.items() if v is storage[1]), dtype)
        _check_description(kind, shape, strides, offset)
    except _BROKEN as error:
        raise ValueError(f"has no tensor at byte {start}: {error}") from None
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(n != 1 and s != d for n, s, d in zip(shape, strides, dense, strict=True)):
        raise ValueError(f"has a tensor at byte {start} that is not in row-major order")
    return FileTensor(path, first + offset * kind.itemsize, kind, tuple(shape))


def _check_description(kind: object, shape: object, strides: object, offset: object) -> None:
    """ValueError for a description of another type, or with numbers that no tensor has."""
    if not isinstance(kind, torch.dtype) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("its description has values of the wrong type")
    numbers = (*shape, *strides, offset)
    if (
        len(shape) != len(strides)
        or len(shape) > MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    ):
        raise ValueError("its description has invalid sizes")


def _content(file: BinaryIO, header: int) -> int:
    """Where the bytes of the record whose local header is at `header` begin."""
    file.seek(header + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return header + 30 + name + extra
