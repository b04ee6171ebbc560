"""Position of a stream in its files, how reading continues from it, and its progress."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megaswift.data.sources.files import DatasetFiles, FilePart
from megaswift.data.sources.mixture import ALL, FIRST, ONCE, Interleaving
from megaswift.data.sources.readers import BY_BYTES, DOCUMENT, LocatedRow, count_rows
from megaswift.errors import DataError, Problem
from megaswift.log import count_text

SAMPLED_FILES = 64
"""Files that `sampled_files_fingerprint` reads."""
PIECES = 8
"""Pieces that it reads of each file, spread from the beginning to the end."""
PIECE_BYTES = 1 << 14
"""Bytes of a piece."""


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
    places: tuple[Cursor, ...] = ()
    """For mixed data sets: the place where reading resumes in each."""
    exhausted: tuple[bool, ...] = ()
    """For mixed data sets: which of them have been read to their ends in this epoch."""
    drawn: int = 0
    """For mixed data sets: the number of draws in this epoch."""


Placed = tuple[str, LocatedRow, Cursor]
"""(file, row, where reading goes on after it)."""


def cursor_from_state(state: Mapping[str, Any]) -> Cursor:
    """The cursor that `asdict` has written."""
    places = tuple(cursor_from_state(place) for place in state.get("places", ()))
    return Cursor(**{**state, "places": places, "exhausted": tuple(state.get("exhausted", ()))})


def read_from_cursor(
    sources: Sequence[DatasetFiles], cursor: Cursor, mixing: Interleaving | None = None
) -> Iterator[Placed]:
    """Rows without end from `cursor` on: data set after data set, or mixed."""
    one_pass = partial(_pass, sources) if mixing is None else partial(_mixed_pass, sources, mixing)
    while True:
        before = cursor
        for placed in one_pass(cursor):
            yield placed
            cursor = placed[2]
        if cursor.rows == 0:
            raise DataError(Problem(", ".join(s.name for s in sources), "contains no rows"))
        cursor = Cursor(epoch=before.epoch + 1, rows=cursor.rows)


def _pass(sources: Sequence[DatasetFiles], cursor: Cursor) -> Iterator[Placed]:
    for number in range(cursor.source, len(sources)):
        at = cursor if number == cursor.source else replace(cursor, source=number, file=0, offset=0, line=1, taken=0)
        for placed in _source(sources[number], at):
            yield placed
            cursor = replace(placed[2], source=number)


def _source(source: DatasetFiles, cursor: Cursor) -> Iterator[Placed]:
    """The rest of one data set's pass."""
    while True:
        for placed in _file(source, cursor):
            yield placed
            cursor = placed[2]
        if source.rows is not None and cursor.taken >= source.rows:
            return
        if cursor.file + 1 < len(source.files):
            cursor = replace(cursor, file=cursor.file + 1, offset=0, line=1)
        elif source.rows is not None and cursor.taken:
            cursor = replace(cursor, file=0, offset=0, line=1)
        else:
            return


def _mixed_pass(sources: Sequence[DatasetFiles], mixing: Interleaving, cursor: Cursor) -> Iterator[Placed]:
    """The rest of a pass over mixed data sets. The row after the one taken is read along, because it shows whether its
    data set is exhausted."""
    starts = tuple(Cursor(source=number) for number in range(len(sources)))
    places = list(cursor.places or starts)
    exhausted = list(cursor.exhausted or [False] * len(sources))
    if mixing.ends(exhausted):
        return
    readers = [_source(*one) for one in zip(sources, places, strict=True)]
    following = [
        None if done and mixing.strategy == ONCE else next(reader, None)
        for done, reader in zip(exhausted, readers, strict=True)
    ]
    drawn = cursor.drawn
    rows = cursor.rows
    for k in mixing.sources(drawn):
        drawn += 1
        taken = following[k]
        if taken is None:
            if exhausted[k]:
                continue  # each row once
            raise DataError(Problem(sources[k].name, "contains no rows"))
        places[k] = taken[2]
        following[k] = next(readers[k], None)
        rows += 1
        if following[k] is None:
            exhausted[k] = True
            places[k] = starts[k]
            if mixing.strategy == ALL:
                readers[k] = _source(sources[k], starts[k])
                following[k] = next(readers[k])
        yield (
            *taken[:2],
            Cursor(cursor.epoch, rows=rows, places=tuple(places), exhausted=tuple(exhausted), drawn=drawn),
        )
        if mixing.ends(exhausted):
            return


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
    digest = hashlib.sha256()
    total = 0
    files = [file for source in sources for file in source.files]
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
    mixing: Interleaving | None = None
    _sizes: dict[Path, int] = field(default_factory=dict)
    """Bytes, looked up once."""
    _rows: dict[Path, int] = field(default_factory=dict)
    """Rows of Parquet files, looked up once."""

    def at(self, cursor: Cursor) -> float:
        """Passes so far; whole ones before the present, and its part."""
        if self.mixing is not None:
            return cursor.epoch + self._mixed(self.mixing, cursor)
        weights = self._weights()
        if not sum(weights):
            return float(cursor.epoch)
        done = sum(weights[: cursor.source]) + weights[cursor.source] * min(1.0, self._within(cursor))
        return cursor.epoch + done / sum(weights)

    def _mixed(self, mixing: Interleaving, cursor: Cursor) -> float:
        """The part of a mixed pass: that of the data set that ends it, as far as they have been read."""
        if not cursor.places:
            return 0.0
        parts = [
            1.0 if done else min(1.0, self._within(place))
            for done, place in zip(cursor.exhausted, cursor.places, strict=True)
        ]
        return max(parts) if mixing.strategy == FIRST else min(parts)

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
        path = source.files[cursor.file]
        offset = cursor.offset
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
