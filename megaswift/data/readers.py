"""Reading rows from each kind of file, lazily, each with its line (or row) number.

Owns the file kinds' grammar only. A row that cannot be read comes out as an error in its place, so that the caller
decides whether to stop.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megaswift.data.sample import LineError, RowError, describe
from megaswift.errors import DataError, Problem

BY_BYTES = ("jsonl", "txt")


@dataclass(frozen=True)
class Located:
    """A row and its place: line of the file (or row number from 1), and the byte after it where that is known."""

    line: int
    row: Mapping[str, Any] | RowError
    end: int = 0
    """Where to go on reading: a byte offset (jsonl, txt) or a row number (the others)."""


def _lines(path: Path, start: int, stop: int, first_line: int) -> Iterator[tuple[int, int, bytes]]:
    with path.open("rb") as f:
        f.seek(start)
        position = start
        for number, raw in enumerate(f, first_line):
            if position >= stop:
                return
            position += len(raw)
            if raw.strip():
                yield number, position, raw


def _text(raw: bytes) -> str | RowError:
    try:
        return raw.decode("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as e:
        return LineError(f"byte {e.start + 1}", "not UTF-8", "text in UTF-8")


def _jsonl(path: Path, start: int, stop: int, first_line: int) -> Iterator[Located]:
    for number, position, raw in _lines(path, start, stop, first_line):
        text = _text(raw)
        if isinstance(text, str):
            try:
                row = json.loads(text)
                if not isinstance(row, dict):
                    row = LineError("line", describe(row), "a JSON object")
            except json.JSONDecodeError as e:
                row = LineError(f"character {e.pos + 1}", f"not JSON: {e.msg}", "one JSON object a line")
        else:
            row = text
        yield Located(number, row, position)


def _txt(path: Path, start: int, stop: int, first_line: int) -> Iterator[Located]:
    for number, position, raw in _lines(path, start, stop, first_line):
        text = _text(raw)
        yield Located(number, text if isinstance(text, RowError) else {"text": text.rstrip("\r\n")}, position)


def _not_utf8(path: Path) -> DataError:
    """Names the first line that is not UTF-8."""
    with path.open("rb") as f:
        line = next((n for n, raw in enumerate(f, 1) if isinstance(_text(raw), RowError)), 1)
    return DataError(Problem(f"{path}:{line}", "not UTF-8", "text in UTF-8"))


def _json_rows(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as e:
        raise DataError(
            Problem(
                f"{path}:{e.lineno}:{e.colno}", f"not JSON: {e.msg}", "a list of objects, or .jsonl with one a line"
            )
        ) from None
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if isinstance(data, dict):
        lists = [v for v in data.values() if isinstance(v, list)]
        data = data.get("data", lists[0] if len(lists) == 1 else data)
    if not isinstance(data, list):
        raise DataError(Problem(str(path), f"holds {describe(data)}", 'a list of objects, or {"data": [...]}'))
    return data


def _json(path: Path, start: int, stop: int, first_line: int) -> Iterator[Located]:
    for i, row in enumerate(_json_rows(path)[start:stop], start + 1):
        yield Located(i, row if isinstance(row, dict) else LineError("item", describe(row), "an object"), i)


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
    csv.field_size_limit(1 << 30)
    with path.open(newline="", encoding="utf-8-sig") as f:
        reader = csv.reader(f, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            header = next(reader, [])
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    fits = len(cells) == len(header)
                    yield (
                        line,
                        dict(zip(header, cells, strict=True))
                        if fits
                        else LineError("row", f"{len(cells)} cells", f"{len(header)}, as in the header"),
                    )
                line = reader.line_num + 1
        except UnicodeDecodeError:
            raise _not_utf8(path) from None
        except csv.Error as e:
            raise DataError(
                Problem(f"{path}:{reader.line_num}", f"not CSV: {e}", "cells quoted where they hold line ends")
            ) from None


def _csv(path: Path, start: int, stop: int, first_line: int) -> Iterator[Located]:
    for i, (line, row) in islice(enumerate(_csv_rows(path), 1), start, stop):
        yield Located(line, row, i)


def _pruned(value: Any) -> Any:
    """Without the nulls that a columnar file puts where a struct has no such key."""
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if v is not None}
    return [_pruned(v) for v in value] if isinstance(value, list) else value


def _parquet_file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(Problem(str(path), f"not a Parquet file: {e}")) from None


def _parquet(path: Path, start: int, stop: int, first_line: int) -> Iterator[Located]:
    file = _parquet_file(path)
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first + rows > start and first < stop:
            n = first
            for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                lo, hi = max(0, start - n), min(batch.num_rows, stop - n)
                if lo < hi:
                    for i, row in enumerate(batch.slice(lo, hi - lo).to_pylist(), n + lo + 1):
                        yield Located(i, _pruned(row), i)
                n += batch.num_rows
        first += rows


READERS: dict[str, Callable[[Path, int, int, int], Iterator[Located]]] = {
    "jsonl": _jsonl,
    "txt": _txt,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
}


def count_rows(path: Path, kind: str, at_most: int | None = None) -> int:
    """How many rows a file has; counting may stop at `at_most`."""
    if kind == "parquet":
        count = int(_parquet_file(path).metadata.num_rows)
    elif kind == "json":
        count = len(_json_rows(path))
    elif kind == "csv":
        count = sum(1 for _ in islice(_csv_rows(path), at_most))
    else:
        count = sum(1 for _ in islice(_lines(path, 0, path.stat().st_size, 1), at_most))
    return count if at_most is None else min(count, at_most)
