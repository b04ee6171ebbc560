"""Renames the columns of rows (`--columns`), reports columns that no row has, and fills in the placeholders of
self-cognition data (`--model_name`, `--model_author`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaswift.data.sources.files import DatasetFiles, FilePart
from megaswift.errors import DataError, Problem, did_you_mean_hint, without_control_characters
from megaswift.log import warn

LOOKED_AT = 1000
"""`check_columns_exist` reads at most this many rows of each file."""


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with its columns renamed. A renamed column replaces a column that already has the new name."""
    unchanged = {name: value for name, value in row.items() if name not in columns}
    return unchanged | {new: row[old] for old, new in columns.items() if old in row}


def fill_self_cognition_name_placeholders(value: Any, texts: Mapping[str, Sequence[str]], chinese: bool = False) -> Any:
    """Return a row, or a value inside a row, with the placeholders of self-cognition data replaced: {{NAME}} and
    {{AUTHOR}}, or {{name}} and {{author}} in LLaMA-Factory's data.

    Args:
        value: The row, or any value inside it.
        texts: Upper-case placeholder -> its text; or two texts, the first for rows whose column `tag` is `zh`.
        chinese: Whether `value` is inside such a row.
    """
    if isinstance(value, str):
        for placeholder, words in texts.items():
            word = words[0 if chinese else -1]
            value = value.replace(placeholder, word).replace(placeholder.lower(), word)
        return value
    if isinstance(value, Mapping):
        chinese = chinese or value.get("tag") == "zh"
        return {key: fill_self_cognition_name_placeholders(v, texts, chinese) for key, v in value.items()}
    if isinstance(value, list):
        return [fill_self_cognition_name_placeholders(v, texts, chinese) for v in value]
    return value


def check_columns_exist(sources: Sequence[DatasetFiles], columns: Mapping[str, str]) -> None:
    """Check that each renamed column is in some row of some data set.

    Raises:
        DataError: No row has one of the columns. If a file has more than `LOOKED_AT` rows, the rest is not read, and
            this is a warning instead.
    """
    # Read rows until every column was found.
    missing = dict(columns)
    seen: dict[str, None] = {}
    all_rows_read = True
    for source, path in ((s, path) for s in sources for path in s.files):
        whole_file = FilePart(str(path), source.kind(path), 0, 1 << 62)
        for number, located in enumerate(whole_file.rows() if missing else ()):
            if number == LOOKED_AT:
                all_rows_read = False
                break
            if isinstance(located.row, Mapping):
                seen |= dict.fromkeys(located.row)
                missing = {old: new for old, new in missing.items() if old not in located.row}
            if not missing:
                break

    # Report the others.
    names = [without_control_characters(name) for name in seen]
    problems = [
        Problem(
            f"--columns {old}={new}",
            f"no row has a column {old}; columns are {', '.join(names[:20])}",
            did_you_mean_hint(old, names) or "FROM=TO, the file's name first",
        )
        for old, new in missing.items()
    ]
    if problems and all_rows_read:
        raise DataError(problems)
    for problem in problems:
        warn(f"{problem.what}: {problem.rule} in the first {LOOKED_AT:,} rows of each file")
