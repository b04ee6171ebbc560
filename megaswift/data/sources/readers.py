"""Reads rows lazily from each file type, each with its line or row number.

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

from megaswift.data.sources import json_text
from megaswift.data.sources.csv_encoding import UTF_8, encoding_of
from megaswift.data.untokenized_sample import LineError, RowError, describe_value
from megaswift.errors import DataError, Problem, without_control_characters
from megaswift.errors import first_line as reason

BY_BYTES = ("jsonl", "txt")
DOCUMENT = "document"
"""The kind of a text file that is one row."""
MOST_CELL = 1 << 28
"""Characters of a CSV cell; one that is longer is an open quote."""
ROWS_A_BYTE = 1000
"""Rows that a byte of a Parquet file may stand for: many where a column repeats one value."""
SAVE_IN_UTF_8 = "save the file in UTF-8 (in Excel as `CSV UTF-8`), or convert it: iconv -f ENCODING -t UTF-8"
DAMAGED = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError)
"""What pyarrow raises for bytes that are no longer those that were written."""


@dataclass(frozen=True)
class LocatedRow:
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
        text = raw.decode("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as e:
        return LineError(f"byte {e.start + 1}", "not UTF-8", "text in UTF-8")
    return LineError(f"byte {raw.index(0) + 1}", "a NUL byte", "text without such characters") if "\0" in text else text


def _jsonl(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    for number, position, raw in _lines(path, start, stop, first_line):
        text = _text(raw)
        yield LocatedRow(number, parse_json_row(text) if isinstance(text, str) else text, position)


def parse_json_row(text: str) -> dict[str, Any] | RowError:
    """The object that a line holds."""
    try:
        row = json_text.parse_json(text)
    except json_text.JsonError as e:
        return LineError(e.where, e.found, e.expected)
    return row if isinstance(row, dict) else LineError("line", describe_value(row), "a JSON object")


def _txt(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    for number, position, raw in _lines(path, start, stop, first_line):
        text = _text(raw)
        yield LocatedRow(number, text if isinstance(text, RowError) else {"text": text.rstrip("\r\n")}, position)


def _document(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    """A text file as one row; none where it is blank."""
    raw = path.read_bytes() if start == 0 < stop else b""
    if raw.strip():
        text = _text(raw)
        yield LocatedRow(1, text if isinstance(text, RowError) else {"text": text}, 1)


def _json_rows(path: Path) -> list[Any]:
    """The items of the file's list; a RowError in the place of one that cannot be read."""
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(
            Problem(
                f"{path}:{e.lineno}:{e.colno}",
                json_text.json_syntax_error_text(e),
                "write a list of objects, or .jsonl with one object per line",
            )
        ) from None
    except (ValueError, RecursionError) as e:
        data = json_text.split_json_list(text)
        if data is None:
            beyond = json_text.json_limit_error(e)
            raise DataError(Problem(str(path), beyond.found, beyond.expected)) from None
        return [parse_json_row(item) for item in data]
    if isinstance(data, dict):
        lists = [v for v in data.values() if isinstance(v, list)]
        data = data.get("data", lists[0] if len(lists) == 1 else data)
    if not isinstance(data, list):
        raise DataError(
            Problem(str(path), f"contains {describe_value(data)}", 'write a list of objects, or {"data": [...]}')
        )
    halves = json_text.has_surrogate_escape(text) or json_text.SURROGATE.search(text) is not None
    return [_json_item(row, halves) for row in data]


def _json_item(row: Any, halves: bool) -> Any:
    if not isinstance(row, dict):
        return LineError("item", describe_value(row), "an object")
    try:
        json_text.refuse_deeply_nested_value(row)
        if halves:
            json_text.check_no_lone_surrogates(row)
    except json_text.JsonError as e:
        fault = e.found.replace("is an unpaired surrogate", "is a byte that is not UTF-8, or an unpaired surrogate")
        return LineError(e.where, fault, e.expected)
    return row


def _json(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    for i, row in enumerate(_json_rows(path)[start:stop], start + 1):
        yield LocatedRow(i, row, i)


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
    csv.field_size_limit(MOST_CELL)
    encoding = encoding_of(path)
    with path.open(newline="", encoding=encoding, errors="surrogateescape") as f:
        reader = csv.reader(f, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        header = _header(path, reader)
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as e:
                yield line, _csv_error(e, line, reader.line_num)
                continue
            if cells is None:
                return
            if cells:
                yield line, _csv_row(header, cells, "UTF-8" if encoding == UTF_8 else "GB18030")


def _csv_error(error: csv.Error, first: int, last: int) -> LineError:
    lines = f"lines {first} to {last}" if last > first else "row"
    if "unexpected end" in str(error):
        return LineError(lines, "an opening quote that is not closed before the end of the file", "a closing quote")
    return LineError(lines, f"not CSV: {error}", "quotes only around whole cells, doubled within a cell")


def _csv_row(header: list[str], cells: list[str], encoding: str) -> dict[str, str] | LineError:
    if len(cells) != len(header):
        return LineError("row", f"{len(cells)} cells", f"{len(header)}, as in the header")
    for name, cell in zip(header, cells, strict=True):
        if "\0" in cell:
            return LineError(f"column {name}", "a NUL byte", "text without such characters")
        if not cell.isascii() and json_text.SURROGATE.search(cell):
            return LineError(f"column {name}", f"not {encoding}", f"text in {encoding}")
    return dict(zip(header, cells, strict=True))


def _header(path: Path, reader: Any) -> list[str]:
    """The first line that is not blank; DataError where it names no columns."""
    try:
        header: list[str] = next((cells for cells in reader if cells), [])
    except csv.Error as e:
        raise DataError(Problem(f"{path}:1", f"is not CSV: {e}", "write column names in the first line")) from None
    place = f"{path}:{max(1, reader.line_num)}"
    if any("\0" in name or json_text.SURROGATE.search(name) for name in header):
        raise DataError(Problem(place, "is not UTF-8 (perhaps UTF-16)", SAVE_IN_UTF_8))
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise DataError(
            Problem(
                place, f"two columns are named {without_control_characters(twice[0])}", "give each column a unique name"
            )
        )
    return header


def _csv(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    for i, (line, row) in islice(enumerate(_csv_rows(path), 1), start, stop):
        yield LocatedRow(line, row, i)


def without_nulls_of_arrow(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow puts where a struct of another row has a key and this one has none; a column
    of its own that is null stays."""
    return {column: _pruned(value) for column, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if v is not None}
    return [_pruned(v) for v in value] if isinstance(value, list) else value


def _parquet_file(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        claimed = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    except DAMAGED as e:
        raise DataError(
            Problem(str(path), f"is not a Parquet file: {reason(e)}", "use a complete copy of the file")
        ) from None
    most = ROWS_A_BYTE * path.stat().st_size
    if sum(claimed) != file.metadata.num_rows or min(claimed, default=0) < 0 or sum(claimed) > most:
        rule = f"is damaged: the footer gives {file.metadata.num_rows:,} rows in {path.stat().st_size:,} bytes"
        raise DataError(Problem(str(path), rule, "use a complete copy of the file"))
    return file


def _parquet(path: Path, start: int, stop: int, first_line: int) -> Iterator[LocatedRow]:
    file = _parquet_file(path)
    first = 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        if end > start and first < stop:
            n = first
            why = "its pages have fewer rows than the footer gives"
            try:
                for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                    batch = batch.slice(0, end - n)
                    lo = max(0, start - n)
                    hi = min(batch.num_rows, stop - n)
                    yield from _parquet_rows(batch, lo, hi, n + 1)
                    n += batch.num_rows
            except DAMAGED as e:
                why = reason(e)
            for i in range(max(n, start), min(end, stop)):  # the pages from here on
                yield LocatedRow(
                    i + 1, LineError("row", f"damaged Parquet data ({why})", "a complete copy of the file"), i + 1
                )
        first = end


def _parquet_rows(batch: pa.RecordBatch, lo: int, hi: int, number: int) -> Iterator[LocatedRow]:
    """Rows lo to hi of a batch, whose first is row `number` of the file."""
    if lo >= hi:
        return
    try:
        rows = batch.slice(lo, hi - lo).to_pylist()
    except DAMAGED:
        rows = [_parquet_row(batch, i) for i in range(lo, hi)]
    for i, row in enumerate(rows, number + lo):
        yield LocatedRow(i, row if isinstance(row, RowError) else without_nulls_of_arrow(row), i)


def _parquet_row(batch: pa.RecordBatch, i: int) -> Any:
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return LineError("row", "text that is not UTF-8", "text in UTF-8")
    except DAMAGED as e:
        return LineError("row", f"a value that cannot be read ({reason(e)})", "text, numbers, or lists of them")


READERS: dict[str, Callable[[Path, int, int, int], Iterator[LocatedRow]]] = {
    "jsonl": _jsonl,
    "txt": _txt,
    DOCUMENT: _document,
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
    elif kind == DOCUMENT:
        count = sum(1 for _ in _document(path, 0, 1, 1))
    elif kind == "csv":
        count = sum(1 for _ in islice(_csv_rows(path), at_most))
    else:
        count = sum(1 for _ in islice(_lines(path, 0, path.stat().st_size, 1), at_most))
    return count if at_most is None else min(count, at_most)
