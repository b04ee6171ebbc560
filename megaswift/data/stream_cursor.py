"""Position of a stream in its files, how reading continues from it, and its progress."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaswift.data.resolve_dataset_files import DatasetFiles, FilePart
from megaswift.data.row_readers import BY_BYTES, DOCUMENT, LocatedRow, count_rows
from megaswift.errors import DataError, Problem
from megaswift.log import count_text

SAMPLED_FILES, PIECES, PIECE_BYTES = 64, 8, 1 << 14
"""What `sampled_files_fingerprint` reads: files, pieces of each from its beginning to its end, bytes of a piece."""


@dataclass(frozen=True)
class Cursor:
    """Where reading goes on."""

    epoch: int = 0
    source: int = 0
    file: int = 0
    offset: int = 0
    """Byte of a JSONL or text file, row of the others."""
    line: int = 1
    taken: int = 0
    """Rows of this source in this epoch."""
    rows: int = 0
    """Rows since the beginning, which number the samples."""


Placed = tuple[str, LocatedRow, Cursor]
"""(file, row, where reading goes on after it)."""


def read_from_cursor(sources: Sequence[DatasetFiles], cursor: Cursor) -> Iterator[Placed]:
    """Rows without end from `at` on."""
    while True:
        before = cursor
        source = sources[cursor.source]
        for placed in _file(source, cursor):
            yield placed
            cursor = placed[2]
        done = source.rows is not None and cursor.taken >= source.rows
        if not done and cursor.file + 1 < len(source.files):
            cursor = replace(cursor, file=cursor.file + 1, offset=0, line=1)
        elif not done and source.rows is not None and cursor.taken:
            cursor = replace(cursor, file=0, offset=0, line=1)
        elif cursor.source + 1 < len(sources):
            cursor = replace(cursor, source=cursor.source + 1, file=0, offset=0, line=1, taken=0)
        elif cursor.rows == 0:
            raise DataError(Problem(", ".join(s.name for s in sources), "contains no rows"))
        else:
            cursor = Cursor(epoch=before.epoch + 1, rows=cursor.rows)


def _file(source: DatasetFiles, at: Cursor) -> Iterator[Placed]:
    path = source.files[at.file]
    kind = source.kind(path)
    left = None if source.rows is None else source.rows - at.taken
    part = FilePart(str(path), kind, at.offset, 1 << 62, at.line, left)
    for n, located in enumerate(part.rows(), 1):
        yield (
            str(path),
            located,
            replace(at, offset=located.end, line=located.line + 1, taken=at.taken + n, rows=at.rows + n),
        )


def sampled_files_fingerprint(sources: Sequence[DatasetFiles]) -> str:
    """Number of files, their bytes and 12 hexadecimal digits, for comparing nodes before they stream.

    The digits are of the names and sizes of all files, and of PIECES pieces of up to SAMPLED_FILES files: a few
    megabytes are read, however large the files."""
    digest, total, files = hashlib.sha256(), 0, [file for source in sources for file in source.files]
    read = {files[i * (len(files) - 1) // max(1, SAMPLED_FILES - 1)] for i in range(SAMPLED_FILES)} if files else set()
    for source in sources:
        for path in source.files:
            size = path.stat().st_size
            total += size
            digest.update(f"{path.name} {size} {source.rows}\n".encode())
            if path in read:
                with path.open("rb") as file:
                    for piece in range(PIECES):
                        file.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
                        digest.update(file.read(PIECE_BYTES))
    return f"{count_text(len(files), 'file')} of {total:,} bytes, {digest.hexdigest()[:12]}"


@dataclass
class StreamFractionalEpoch:
    """Passes over the data at a cursor: exact at the ends of a pass, and within it as far as the files tell without
    being read.

    By bytes (JSONL, text), by rows (Parquet, and `path#rows`); of CSV and JSON lists only whole files are counted.
    Where some data sets are taken by rows and others are not, their parts of a pass are not known: whole passes only.
    """

    sources: Sequence[DatasetFiles]
    _sizes: dict[Path, int] = field(default_factory=dict)
    """Bytes, looked up once."""
    _rows: dict[Path, int] = field(default_factory=dict)
    """Rows of Parquet files, looked up once."""

    def at(self, cursor: Cursor) -> float:
        """Passes so far; whole ones before the present, and its part."""
        weights = self._weights()
        if not sum(weights):
            return float(cursor.epoch)
        done = sum(weights[: cursor.source]) + weights[cursor.source] * min(1.0, self._within(cursor))
        return cursor.epoch + done / sum(weights)

    def _weights(self) -> list[int]:
        """What each source is of a pass: rows, or bytes; nothing where it is not known."""
        by_rows = [s.rows is not None for s in self.sources]
        if any(by_rows):
            return [s.rows or 0 for s in self.sources] if all(by_rows) else []
        return [sum(self._size(f) for f in s.files) for s in self.sources]

    def _within(self, cursor: Cursor) -> float:
        source = self.sources[cursor.source]
        if source.rows is not None:
            return cursor.taken / source.rows
        sizes = [self._size(f) for f in source.files]
        return (sum(sizes[: cursor.file]) + self._read(source, cursor)) / max(1, sum(sizes))

    def _read(self, source: DatasetFiles, cursor: Cursor) -> float:
        """Bytes of a file before the cursor's offset; none where only reading tells."""
        path, offset = source.files[cursor.file], cursor.offset
        kind = source.kind(path)
        if kind in BY_BYTES:
            return offset
        if kind == DOCUMENT:
            return offset * self._size(path)
        if kind != "parquet":
            return 0
        if path not in self._rows:
            self._rows[path] = count_rows(path, kind)
        return self._size(path) * offset / max(1, self._rows[path])

    def _size(self, path: Path) -> int:
        if path not in self._sizes:
            self._sizes[path] = path.stat().st_size
        return self._sizes[path]
