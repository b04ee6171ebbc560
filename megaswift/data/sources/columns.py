"""`--columns` renames the columns of rows, and `--model_name` and `--model_author` fill in placeholders; names that no
row has are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaswift.data.sources.files import DatasetFiles, FilePart
from megaswift.errors import DataError, Problem, did_you_mean_hint, without_control_characters
from megaswift.log import warn

LOOKED_AT = 1000
"""Rows of a file in which a column must turn up."""


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under its new names; a renamed column goes before one that has the name already."""
    own = {name: value for name, value in row.items() if name not in columns}
    return own | {new: row[old] for old, new in columns.items() if old in row}


def fill_self_cognition_name_placeholders(value: Any, texts: Mapping[str, Sequence[str]], chinese: bool = False) -> Any:
    """A row, or a value of it, with {{NAME}} and {{AUTHOR}} replaced, as rows of self-cognition data sets have them;
    {{name}} and {{author}}, as LLaMA-Factory's have them, too.

    `texts`: placeholder -> its text, or two, of which the first is for rows whose column `tag` is zh.
    """
    if isinstance(value, str):
        for placeholder, words in texts.items():
            word = words[0 if chinese else -1]
            value = value.replace(placeholder, word).replace(placeholder.lower(), word)
        return value
    if isinstance(value, Mapping):
        chinese = chinese or value.get("tag") == "zh"
        return {key: fill_self_cognition_name_placeholders(v, texts, chinese) for key, v in value.items()}
    return (
        [fill_self_cognition_name_placeholders(v, texts, chinese) for v in value] if isinstance(value, list) else value
    )


def check_columns_exist(sources: Sequence[DatasetFiles], columns: Mapping[str, str]) -> None:
    """DataError for columns that no row of any data set has; a warning where not all rows were looked at."""
    lacking = dict(columns)
    seen = dict[str, None]()
    whole = True
    for source, path in ((s, path) for s in sources for path in s.files):
        for number, located in enumerate(FilePart(str(path), source.kind(path), 0, 1 << 62).rows() if lacking else ()):
            if number == LOOKED_AT:
                whole = False
                break
            if isinstance(located.row, Mapping):
                seen |= dict.fromkeys(located.row)
                lacking = {old: new for old, new in lacking.items() if old not in located.row}
            if not lacking:
                break
    names = [without_control_characters(name) for name in seen]
    problems = [
        Problem(
            f"--columns {old}={new}",
            f"no row has a column {old}; columns are {', '.join(names[:20])}",
            did_you_mean_hint(old, names) or "FROM=TO, the file's name first",
        )
        for old, new in lacking.items()
    ]
    if problems and whole:
        raise DataError(problems)
    for problem in problems:
        warn(f"{problem.what}: {problem.rule} in the first {LOOKED_AT:,} rows of each file")
