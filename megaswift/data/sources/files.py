"""Data set specifications, local files, and rows with their positions in files.

Owns `path#500`, `path:subset`, folders, the file kinds (JSONL, JSON, CSV, Parquet, text) and cutting files into parts
that worker processes read on their own. Ids on a hub belong to `hub.py`; what the columns
mean belongs to `formats/`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaswift.data.options.hub_ids import HUGGING_FACE, split_hub_prefix
from megaswift.data.sources import readers
from megaswift.errors import DataError, Problem, did_you_mean_hint, missing_path_hint

KIND_OF = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
}
PACKED = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".tar": "tar -xf"}
"""Files to unpack first, and what does it."""
FILE_NAME = re.compile(r"[^/]+\.[A-Za-z]\w*")
"""No id of a hub: those without an owner have no dot but in numbers."""
CACHED_DATASET = "cached_dataset.json"
"""Makes a folder one of tokens (`store/cached.py`)."""
PART_BYTES = 8 << 20
PARTS = 32
"""A smaller file is cut into so many, for any number of processes: what is said of its malformed rows is then the
same."""


@dataclass(frozen=True)
class DatasetFiles:
    """One entry of `--dataset`: its files in order and how many rows to take."""

    name: str
    files: tuple[Path, ...]
    rows: int | None = None
    """From `#500`: take this many rows; all of them several times when there are fewer."""
    first: bool = False
    """From `#:500`: the first rows of the file, whatever the seed."""
    draw: tuple[int, int] | None = None
    """Seed and place in `--dataset` where the rows of `#500` are drawn at random; None: they are the first ones."""

    entry: int = 0
    """Number of its entry in `--dataset`; a cached data set may hold several under one entry."""
    sample_by: str = "line"
    """What is a row of a text file: a `line`, or the whole `document`."""

    def kind(self, path: Path) -> str:
        """The kind of one of its files."""
        kind = file_kind(path)
        return readers.DOCUMENT if kind == "txt" and self.sample_by == "document" else kind

    def drawn(self, count: int, rows: int) -> list[int]:
        """`rows` of the numbers below `count`, in order: drawn at random, or the first."""
        if self.draw is None:
            return list(range(rows))
        seed, place = self.draw
        return sorted(random.Random(f"{seed} {place}").sample(range(count), rows))

    def taken(self, count: int) -> list[int]:
        """Which of `count` rows a pass takes: each as often as they fit into `#rows` whole, then some once more."""
        wanted = count if self.rows is None else self.rows
        return [*range(count)] * (wanted // count) + self.drawn(count, wanted % count)


@dataclass(frozen=True)
class FilePart:
    """A piece of one file that a worker reads on its own."""

    path: str
    kind: str
    start: int
    """First byte (jsonl, txt) or first row (the others)."""
    stop: int
    """One past the last."""
    first_line: int = 1
    limit: int | None = None
    """Read at most this many rows."""
    picked: tuple[int, ...] | None = None
    """Read these rows alone, counted from 0."""

    def rows(self, start: int | None = None) -> Iterator[readers.LocatedRow]:
        """The rows of this part; broken ones come as errors."""
        reader: Callable[..., Iterator[readers.LocatedRow]] = readers.READERS[self.kind]
        picked = None if self.picked is None else set(self.picked)
        for n, located in enumerate(
            reader(Path(self.path), self.start if start is None else start, self.stop, self.first_line)
        ):
            if self.limit is not None and n >= self.limit:
                return
            if picked is None or n in picked:
                yield located


Amount = tuple[int | None, bool]
"""Rows to take, and whether these are the first."""


def _split_spec(spec: str, flag: str) -> tuple[str, str | None, Amount]:
    """Path or id, subset and rows of `path:subset#500`, `path#:500`."""
    amount: Amount = (None, False)
    match = re.fullmatch(r"(.+)#(:?)(\d+)", spec)
    if match and not Path(spec).exists():
        spec = match[1]
        amount = (int(match[3]), bool(match[2]))
        if amount[0] == 0:
            raise DataError(Problem(f"{flag} {spec}#0", "selects no rows", f"{spec}#500 for 500 rows"))
    if not Path(spec).exists():
        match = re.fullmatch(r"(.+):([^:/]+)", spec)
        if match:
            return match[1], match[2], amount
        if match := re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+(?:/[\w.-]+)+)", spec):
            return match[1], match[2], amount
    return spec, None, amount


def _folder(path: Path, subset: str | None) -> tuple[Path, ...]:
    if subset is not None and (path / subset).is_dir():
        path = path / subset
        subset = None
    files = [f for f in sorted(path.rglob("*")) if f.suffix.lower() in KIND_OF and f.is_file()]
    files = [f for f in files if not any(p.startswith((".", "_")) for p in f.relative_to(path).parts)]
    if any(KIND_OF[f.suffix.lower()] != "txt" for f in files):
        files = [f for f in files if f.suffix.lower() != ".md"]  # a README beside the data
    return tuple(f for f in files if subset is None or f.stem == subset)


def resolve_dataset_files(
    spec: str, from_hub: Callable[[str, str | None, str], tuple[Path, ...]], flag: str = "--dataset"
) -> DatasetFiles:
    """The files behind one entry of `flag`; DataError where there are none. `from_hub` fetches an id that is no path:
    name, subset, hub."""
    # An entry with a hub's prefix is fetched from it.
    hub, entry = split_hub_prefix(spec)
    name, subset, amount = _split_spec(entry, flag)
    if hub is not None:
        return DatasetFiles(spec, from_hub(name, subset, hub), *amount)
    # A folder: its data files, or those named after the subset.
    path = Path(name).expanduser()
    if path.is_dir():
        if cached_dataset_folder(name):
            rule = "is a cached data set: tokens for training, which is not streamed"
            raise DataError(Problem(f"{flag} {spec}", rule, "give the rows, or train without --streaming"))
        files = _folder(path, subset)
        if not files:
            inner = {p.name for p in path.iterdir() if p.is_dir() and _folder(p, None)}
            there = sorted({f.stem for f in _folder(path, None)} | inner) if subset else []
            some = f"{path}:{', '.join(there[:10])}" if there else "give a folder with " + ", ".join(sorted(KIND_OF))
            raise DataError(
                Problem(
                    spec,
                    f"no data files{f' named {subset}' if subset else ''} in this folder",
                    did_you_mean_hint(str(subset), there) or some,
                )
            )
        return DatasetFiles(spec, files, *amount)
    # A single file, which must be of a known type.
    if path.is_file():
        if subset is not None:
            raise DataError(Problem(spec, "a single file does not have subsets", str(path)))
        if path.suffix.lower() in PACKED:
            unpack = f"{PACKED[path.suffix.lower()]} {path.name}"
            raise DataError(Problem(spec, f"{path.suffix} files are not supported", f"{unpack}, then {path.stem}"))
        if path.suffix.lower() not in KIND_OF:
            raise DataError(
                Problem(
                    spec,
                    f"unknown file type {path.suffix or '(no extension)'}",
                    "use one of " + ", ".join(sorted(KIND_OF)),
                )
            )
        return DatasetFiles(spec, (path,), *amount)
    # Anything else is a hub id, unless it looks like a path that does not exist.
    if "#" in name:
        raise DataError(Problem(spec, "the text after # is not a number of rows", f"{name.partition('#')[0]}#500"))
    if (
        path.suffix.lower() in KIND_OF
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or FILE_NAME.fullmatch(name)
    ):
        raise DataError(Problem(f"{flag} {spec}", "no such file or folder", missing_path_hint(path)))
    return DatasetFiles(spec, from_hub(name, subset, HUGGING_FACE), *amount)


def cached_dataset_folder(name: str) -> Path | None:
    """The folder of a cached data set; None where `name` is something else."""
    folder = Path(name).expanduser()
    return folder if (folder / CACHED_DATASET).is_file() else None


def file_kind(path: Path) -> str:
    """The kind of a file; a `.json` file that holds one object a line is JSONL."""
    kind = KIND_OF[path.suffix.lower()]
    if kind != "json":
        return kind
    with path.open("rb") as f:
        head = f.read(1 << 16).lstrip()
        first, rest = head.split(b"\n", 1) if b"\n" in head else (head, b"")
    if not first.startswith(b"{"):
        return "json"
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return "json"
    return "jsonl" if rest.strip() or '"data"' not in first.decode(errors="replace") else "json"


def _line_parts(path: Path, kind: str, size: int) -> list[FilePart]:
    parts = []
    start = 0
    line = 1
    total = path.stat().st_size
    with path.open("rb") as f:
        while start < total:
            f.seek(start)
            block = f.read(size)
            block += f.readline()
            parts.append(FilePart(str(path), kind, start, start + len(block), line))
            start += len(block)
            line += block.count(b"\n")
    return parts


def _drawn_parts(source: DatasetFiles) -> list[FilePart]:
    """A part of each file with the rows that are drawn from all; none where there are not more rows than are taken."""
    kinds = [source.kind(path) for path in source.files]
    counts = [readers.count_rows(path, kind) for path, kind in zip(source.files, kinds, strict=True)]
    if source.rows is None or sum(counts) <= source.rows:
        return []
    drawn = source.drawn(sum(counts), source.rows)
    parts = []
    before = 0
    for path, kind, count in zip(source.files, kinds, counts, strict=True):
        picked = tuple(n - before for n in drawn if before <= n < before + count)
        stop = path.stat().st_size if kind in readers.BY_BYTES else count
        parts += [FilePart(str(path), kind, 0, stop, picked=picked)] if picked else []
        before += count
    return parts


def split_into_parts(source: DatasetFiles, processes: int, size: int = PART_BYTES) -> list[FilePart]:
    """The source's files cut into parts, in order; small enough that every process gets several where the data allow
    it."""
    parts: list[FilePart] = []
    if source.rows is not None and source.draw is not None:
        parts = _drawn_parts(source)
        if parts:
            return parts
    left = None if source.draw is not None else source.rows
    for path in source.files:
        kind = source.kind(path)
        if left is not None:
            count = readers.count_rows(path, kind, left)
            parts.append(
                FilePart(str(path), kind, 0, path.stat().st_size if kind in readers.BY_BYTES else count, 1, left)
            )
            left -= count
            if left <= 0:
                break
        elif kind in readers.BY_BYTES:
            wanted = max(1 << 16, min(size, path.stat().st_size // PARTS + 1))
            parts += _line_parts(path, kind, wanted)
        else:
            count = readers.count_rows(path, kind)
            step = max(1, -(-count // processes))
            parts += [FilePart(str(path), kind, i, min(i + step, count)) for i in range(0, count, step)]
    return parts
