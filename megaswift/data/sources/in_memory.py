"""Writes rows from Python (a list of dictionaries or a `datasets.Dataset`) to a file that a run can read.

Owns the file's name and contents. It lies in the cache folder and is named by a hash of its rows, so that every process
of a job writes the same file, `config.yaml` names it, and a resumed run finds it again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megaswift.data.sources.readers import without_nulls_of_arrow
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.errors import ConfigError, DataError, Problem

FIX = "give a path, a list of paths, a list of dictionaries or a datasets.Dataset"


def dataset_option_paths(given: Any, option: str, cache: str | None) -> str | list[str]:
    """What `Trainer.train(dataset=...)` was given, as paths for `--dataset`; rows are written to `cache` (None: the
    default folder). Raises ConfigError for what no run can read."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    if _is_dataset(given) or (_is_sequence(given) and given and all(isinstance(row, Mapping) for row in given)):
        return _stored(given, option, cache)
    if _is_sequence(given) and given and all(isinstance(g, str | os.PathLike) or _is_dataset(g) for g in given):
        return [_stored(g, option, cache) if _is_dataset(g) else os.fspath(g) for g in given]
    raise ConfigError(Problem(option, *_refusal(given)))


def _is_sequence(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)


def _is_dataset(given: Any) -> bool:
    """`datasets.Dataset`, without importing the library for those who do not use it."""
    kind = type(given)
    return kind.__module__.split(".")[0] == "datasets" and kind.__name__ == "Dataset"


def _refusal(given: Any) -> tuple[str, str]:
    name = type(given).__name__
    if name in ("DatasetDict", "IterableDatasetDict"):
        return f"is a {name} of {', '.join(map(str, given))}; a run needs one split", "dataset=splits['train']"
    if name == "IterableDataset":
        return "is an IterableDataset, which has no length", "give its files as paths, with streaming=True"
    if _is_sequence(given) and not given:
        return "is empty", FIX
    if _is_sequence(given):
        kinds = sorted({type(row).__name__ for row in given})
        return f"contains elements of type {', '.join(kinds)}", FIX
    return f"is of type {name}", FIX


def _stored(rows: Iterable[Mapping[str, Any]], option: str, cache: str | None) -> str:
    folder = data_cache_folder(cache) / "rows"
    fresh = folder / f".{os.getpid()}.jsonl"
    digest = hashlib.sha256()
    try:
        folder.mkdir(exist_ok=True)
        with fresh.open("wb") as file:
            for number, row in enumerate(rows):
                line = _line(without_nulls_of_arrow(row) if _is_dataset(rows) else row, number, option)
                digest.update(line)
                file.write(line)
        target = folder / f"{digest.hexdigest()[:32]}.jsonl"
        fresh.replace(target)
    except OSError as error:
        raise DataError(
            Problem(
                f"--dataset_cache_dir {folder}",
                f"cannot be written ({error.strerror})",
                "give a folder with free space",
            )
        ) from None
    finally:
        with suppress(OSError):
            fresh.unlink()
    return str(target)


def _line(row: Mapping[str, Any], number: int, option: str) -> bytes:
    """A row as a line of JSONL."""
    try:
        return (json.dumps(dict(row), ensure_ascii=True) + "\n").encode()
    except (TypeError, ValueError, RecursionError):
        column = next((name for name, value in row.items() if not _is_json(value)), "?")
        raise ConfigError(
            Problem(
                option,
                f"row {number}, column {column}: {type(row.get(column)).__name__} cannot be represented in JSON",
                "use text, numbers, lists and dictionaries; images as paths; or a Parquet file: "
                "dataset.to_parquet(FILE)",
            )
        ) from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
