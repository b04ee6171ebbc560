"""Reads and writes Megatron-LM's indexed data: PREFIX.bin holds tokens, PREFIX.idx where each sequence begins.

    PREFIX.idx: MMIDIDX and two zero bytes, uint64 version 1, uint8 type of a token, uint64 sequences,
        uint64 documents + 1, int32 [sequences] lengths, int64 [sequences] offsets in bytes,
        int64 [documents + 1] the first sequence of each document

Owns the format (Megatron-Core's `indexed_dataset.py`, without its modes of multimodal sequences) and refuses files that
are damaged. Nothing but what is touched comes into memory.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megaswift.base.atomic_writes import atomic_file
from megaswift.errors import DataError, Problem

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, type[np.generic]] = dict(
    zip((1, 2, 3, 4, 5, 8), (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16), strict=True)
)
"""By the code in the header; 6 and 7, floating point, hold no tokens."""
SAMPLED = 1 << 20
"""Bytes at either end of a file that name its content."""
CHECKED = 1 << 20
"""Sequences whose lengths and offsets are checked at a time."""
AGAIN = "make the files again (megaswift data index, or Megatron-LM's preprocess_data.py)"


@dataclass(frozen=True)
class IndexedTokens:
    """An open pair of files."""

    prefix: str
    lengths: np.ndarray
    """int32 [sequences]"""
    offsets: np.ndarray
    """int64 [sequences]: the first byte of each."""
    documents: int
    tokens: np.ndarray
    """The tokens of PREFIX.bin, memory-mapped."""

    def read(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a sequence."""
        first = int(self.offsets[sequence]) // self.tokens.itemsize
        return self.tokens[first + start : first + stop]

    @cached_property
    def content(self) -> str:
        """A hash of both files' sizes and of the bytes at their ends."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (index_path(self.prefix), tokens_path(self.prefix)):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                digest.update(file.read(SAMPLED))
                file.seek(max(0, size - SAMPLED))
                digest.update(file.read(SAMPLED))
        return digest.hexdigest()


def index_path(prefix: str) -> Path:
    """PREFIX.idx"""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str) -> Path:
    """PREFIX.bin"""
    return Path(f"{prefix}.bin")


def open_indexed_tokens(prefix: str) -> IndexedTokens:
    """The files of a prefix; DataError where one is missing, damaged or not of this format."""
    index = index_path(prefix)
    binary = tokens_path(prefix)
    for path in (index, binary):
        if path.exists() and not path.is_file():
            raise DataError(Problem(str(path), "is not a file", AGAIN))
    try:
        size = index.stat().st_size
        bytes_of_tokens = binary.stat().st_size
        with index.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(Problem(str(error.filename), f"cannot be read ({error.strerror})", "give PREFIX of PREFIX.idx "
                                "and PREFIX.bin")) from None  # fmt: skip
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise DataError(Problem(str(index), "is not an index of Megatron-LM (its header is another)", AGAIN))
    _, version, code, sequences, edges = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES:
        raise DataError(
            Problem(str(index), f"has version {version} and token type {code}; expected 1 and an integer type")
        )
    least = HEADER.size + 12 * sequences + 8 * edges
    if size < least:
        raise DataError(Problem(str(index), f"is cut off: {size:,} bytes, {least:,} expected", AGAIN))
    lengths = np.memmap(index, np.int32, "r", HEADER.size, (sequences,)) if sequences else np.zeros(0, np.int32)
    offsets = (
        np.memmap(index, np.int64, "r", HEADER.size + 4 * sequences, (sequences,))
        if sequences
        else np.zeros(0, np.int64)
    )
    dtype = np.dtype(TOKEN_TYPES[code])
    _refuse_damaged_index(index, binary, (lengths, offsets), (bytes_of_tokens, dtype.itemsize))
    tokens = np.memmap(binary, dtype, "r") if bytes_of_tokens >= dtype.itemsize else np.zeros(0, dtype)
    return IndexedTokens(prefix, lengths, offsets, max(0, edges - 1), tokens)


def _refuse_damaged_index(
    index: Path, binary: Path, entries: tuple[np.ndarray, np.ndarray], sizes: tuple[int, int]
) -> None:
    """DataError that names the first sequence whose length or offset lies outside PREFIX.bin, or between two tokens.

    Args:
        entries: All lengths (tokens) and offsets (bytes).
        sizes: Bytes of PREFIX.bin, and of a token.
    """
    lengths, offsets = entries
    file_bytes, width = sizes
    for start in range(0, len(lengths), CHECKED):
        length = np.asarray(lengths[start : start + CHECKED], np.int64)
        offset = np.asarray(offsets[start : start + CHECKED])
        room = file_bytes - np.clip(offset, 0, file_bytes)  # no difference of these overflows
        cut_off = (offset > file_bytes) | (length * width > room)
        wrong = (length < 0) | (offset < 0) | (offset % width != 0) | cut_off
        if not wrong.any():
            continue
        first = int(wrong.argmax())
        if length[first] < 0:
            rule = f"has {length[first]:,} tokens"
        elif offset[first] < 0 or offset[first] % width:
            rule = f"begins at byte {offset[first]:,}; tokens of {width} bytes begin at multiples of {width} from 0 on"
        else:
            end = int(offset[first]) + int(length[first]) * width
            rule = f"is cut off: {file_bytes:,} bytes; sequence {start + first} of {index} ends at byte {end:,}"
            raise DataError(Problem(str(binary), rule, AGAIN))
        raise DataError(Problem(f"{index}, sequence {start + first}", rule, AGAIN))


def smallest_token_type(vocabulary: int) -> np.dtype[np.generic]:
    """uint16 where all tokens fit, else int32; as Megatron-LM chooses."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)


def write_indexed_tokens(
    prefix: str, lengths: np.ndarray, blocks: Iterable[np.ndarray], dtype: np.dtype[np.generic]
) -> None:
    """PREFIX.bin and PREFIX.idx of documents of one sequence each; `blocks`: all their tokens, in pieces."""
    count = len(lengths)
    code = next(code for code, kind in TOKEN_TYPES.items() if np.dtype(kind) == dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    index_path(prefix).unlink(missing_ok=True)  # an index is never beside other tokens than its own
    with atomic_file(tokens_path(prefix)) as path, path.open("wb") as file:
        for block in blocks:
            file.write(block.astype(dtype).tobytes())
    with atomic_file(index_path(prefix)) as path, path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        file.write(lengths.astype(np.int32).tobytes())
        file.write((starts * dtype.itemsize).tobytes())
        file.write(np.arange(count + 1, dtype=np.int64).tobytes())
