"""The names of classes, found in the rows to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaswift.data.labeled.labels import whole_number, written_classes
from megaswift.data.options.data import DataConfig
from megaswift.data.sources.columns import rename_columns
from megaswift.data.sources.files import DatasetFiles, FilePart, cached_dataset_folder
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.tokenization import resolve_or_download_dataset_files
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError, Problem

LOOKED_AT = 1000
"""Rows of a stream in which classes are looked for."""
MOST = 10_000
"""More different texts are no classes."""
SHOWN = 20


def class_names_in_rows(data: DataConfig, tokens: bool) -> tuple[str, ...]:
    """Return the names of classes that the rows of `--dataset` write, sorted; none where they write numbers and
    `--num_labels` says how many there are.

    Args:
        data: The options of the data.
        tokens: Whether words have classes, instead of whole texts.

    Raises:
        DataError: The rows write numbers, or are a stream, and the options do not say what classes there are.
    """
    written: set[Any] = set()
    for value in _written(data, tokens):
        if data.num_labels is not None and whole_number(value) is not None:
            return ()
        written.add(value)
        if len(written) > MOST:
            rule = f"has over {MOST:,} different values in the column of classes"
            fix = "--columns OTHER=label, or --problem_type regression"
            raise DataError(Problem(", ".join(data.dataset), rule, fix))
    names = tuple(sorted(value for value in written if isinstance(value, str)))
    if any(whole_number(name) is None for name in names):
        return _checked(data, names)
    numbers = [number for value in written if (number := whole_number(value)) is not None]
    if not numbers and data.num_labels is not None:
        return ()  # the rows are cached, or have no class, which is reported when they are read
    if not numbers:
        rule = "is missing, and no row has a class"
        raise DataError(Problem("--num_labels", rule, "--columns OTHER=label, or rows with a column label"))
    most = max(numbers) + 1
    rule = f"is missing: the rows name classes by numbers, of which the largest is {most - 1}"
    raise DataError(Problem("--num_labels", rule, f"--num_labels {most}, or --class_names with a name for each"))


def _checked(data: DataConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    shown = " ".join(json.dumps(name, ensure_ascii=False) if " " in name else name for name in names[:SHOWN])
    given = f"--class_names {shown}{' ...' if len(names) > SHOWN else ''}"
    if data.streaming:
        rule = "is missing: the rows name their classes, and a stream is not read for them beforehand"
        raise DataError(Problem("--class_names", rule, f"{given}, and any that come later"))
    if data.num_labels not in (None, len(names)):
        rule = f"is not the number of classes that the rows name, {len(names)}"
        raise DataError(Problem(f"--num_labels {data.num_labels}", rule, f"leave it out, or {given}"))
    return names


def _written(data: DataConfig, tokens: bool) -> Iterator[Any]:
    """The classes of all rows, of a stream those of the first ones; malformed rows are reported when they are
    tokenized."""
    for count, row in enumerate(_rows(data)):
        if data.streaming and count == LOOKED_AT:
            return
        try:
            found = written_classes(rename_columns(row, data.columns), tokens)
        except (RowError, ValueError):
            continue
        for value in found:
            if isinstance(value, str | int | float):
                yield value


def _rows(data: DataConfig) -> Iterator[Mapping[str, Any]]:
    root = data_cache_folder(data.dataset_cache_dir)
    for name in data.dataset:
        if cached_dataset_folder(name) is not None and data.num_labels is not None:
            continue
        if cached_dataset_folder(name) is not None:
            rule = "is a cached data set, whose rows are tokens: the options have to say what classes there are"
            raise DataError(Problem(f"--dataset {name}", rule, "--class_names or --num_labels, as it was written with"))
        source = resolve_or_download_dataset_files(name, root)
        for path in source.files:
            yield from _rows_of_file(source, path)


def _rows_of_file(source: DatasetFiles, path: Path) -> Iterator[Mapping[str, Any]]:
    for located in FilePart(str(path), source.kind(path), 0, 1 << 62).rows():
        if not isinstance(located.row, RowError):
            yield located.row
