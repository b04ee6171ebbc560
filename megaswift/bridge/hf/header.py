"""The header of a safetensors file, checked so that every tensor it lists is within the file.

A file is the header's length in 8 bytes (little endian), the header as JSON, and the tensors' bytes without a gap or an
overlap. Whose tensors they are belongs to the sources.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 100_000_000
"""Bytes; the safetensors library's own limit."""
MOST = 2**63 - 1
MOST_DIMENSIONS = 64
"""Maximum dimensions of a tensor in a file: the product of more sizes would take longer than the file is long."""


class HeaderEntry(NamedTuple):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """The position of its bytes, from the beginning of the file."""
    stop: int


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise ValueError for a name that comes twice, of which `json.loads` would keep the last."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise DamagedHeader(f"has duplicate keys: {', '.join(sorted(twice))}")
    return dict(pairs)


class DamagedHeader(ValueError):
    """What is wrong with a file, in words that follow its name."""


def read_safetensors_header(path: Path) -> dict[str, HeaderEntry]:
    """Read the tensors of one file's header; `DamagedHeader` where it is wrong."""
    if path.exists() and not path.is_file():
        raise DamagedHeader("is not a file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise DamagedHeader(f"is truncated or not a safetensors file ({size} bytes)")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=reject_duplicate_keys)
    except DamagedHeader:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedHeader(f"is not a safetensors file: {error}") from None
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise DamagedHeader("is not a safetensors file: its header is not a JSON object")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise DamagedHeader("has a damaged header: __metadata__ must map strings to strings")
    entries = {name: _tensor(name, entry, 8 + length) for name, entry in header.items()}
    _without_gaps(entries, 8 + length, size)
    return entries


def _tensor(name: str, entry: Any, base: int) -> HeaderEntry:
    """One entry; `base` is where the tensors' bytes begin."""
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        name.encode("utf-8")
    except (KeyError, TypeError, ValueError):
        raise DamagedHeader(f"has a damaged header at tensor {ascii(name)[1:-1]}") from None
    if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n <= MOST for n in (*shape, first, last)):
        raise DamagedHeader(f"has a damaged header at tensor {name}: sizes and offsets must be whole numbers")
    if len(shape) > MOST_DIMENSIONS:
        raise DamagedHeader(f"has a damaged header at tensor {name}: its shape has {len(shape):,} dimensions")
    if math.prod(max(1, n) for n in shape) > MOST:
        raise DamagedHeader(f"has a damaged header at tensor {name}: the shape {list(shape)} is invalid")
    if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise DamagedHeader(f"has {last - first} bytes for tensor {name} of shape {list(shape)} and dtype {dtype}")
    return HeaderEntry(dtype, shape, base + first, base + last)


def _without_gaps(entries: dict[str, HeaderEntry], base: int, size: int) -> None:
    """Tensors follow each other from `base` to the end of the file."""
    end = base
    before = "the header"
    for name, stored in sorted(entries.items(), key=lambda item: item[1][2:]):
        if stored.start != end or stored.stop < stored.start:
            what = "overlaps" if stored.start < end else "leaves a gap after"
            raise DamagedHeader(
                f"has a damaged header: tensor {name}, bytes {stored.start} to {stored.stop}, {what} {before}"
            )
        end = stored.stop
        before = f"tensor {name}"
    if size != end:
        last = f" for {before}" if entries else ""
        raise DamagedHeader(f"has {size} bytes, but its header requires {end}{last}: it is truncated or damaged")
