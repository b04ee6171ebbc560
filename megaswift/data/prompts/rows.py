"""Splits a row into prompt, reference answer and other columns.

Owns which columns of a row are the question. Formats are those of training; an answer need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megaswift.data.formats import FORMATS, Row, recognize_format
from megaswift.data.preference.rows import COLUMNS
from megaswift.data.untokenized_sample import RowError, UntokenizedSample

ANSWERS = ("response", "output")
"""Columns that formats of training need and a question does not have."""
PROMPT = ("prompt", "system", "tools")
ANSWER = "response"
"""The column in which a question keeps the answer of its conversation."""


@dataclass(frozen=True)
class PromptRow:
    """A conversation that ends where the model speaks (or a text), and the other columns of its row."""

    sample: UntokenizedSample
    columns: dict[str, Any]


def lacks_only_answer(row: Row, task: str) -> bool:
    """Whether a format of `task` lacks nothing but the answer."""
    present = {k for k, v in row.items() if v is not None}
    lacking = [(set(f.required) - present, present & set(f.required)) for f in FORMATS if task in f.tasks]
    return any(missing and there and missing <= set(ANSWERS) for missing, there in lacking)


def make_row_readable_as_prompt(row: Row, task: str) -> Row:
    """The row without columns of preferences, and with an empty answer where it needs one to be read."""
    row = {k: v for k, v in row.items() if k not in COLUMNS}
    present = {k for k, v in row.items() if v is not None}
    if lacks_only_answer(row, task) and not any(present >= set(f.required) for f in FORMATS if task in f.tasks):
        return {**row, **dict.fromkeys(ANSWERS, "")}
    return row


def split_prompt_row(row: Row, task: str, names: Mapping[str, str]) -> PromptRow:
    """The question of a row; RowError when it has none. An answer at the end of the conversation becomes the column
    `response`.

    `names`: what columns are called instead.
    """
    # whatever else the row might be
    prompt_columns = row if row.get("prompt") is None else {k: v for k, v in row.items() if k in PROMPT}
    filled = make_row_readable_as_prompt(prompt_columns, task)
    form = recognize_format(filled, task)
    sample = form.parse(filled)
    assert isinstance(sample, UntokenizedSample)
    read = {*form.required, *form.optional, *PROMPT}
    columns = {k: v for k, v in row.items() if k not in read}
    if sample.text is not None:
        return PromptRow(sample, columns)
    end = len(sample.messages)
    answer = None
    while end and sample.messages[end - 1]["role"] == "assistant":
        end -= 1
        answer = sample.messages[end].get("content") if answer is None else answer
    if not end:
        raise RowError(form.required[0], "no message before the completion", "a question")
    if isinstance(answer, str) and answer:
        columns.setdefault(names.get(ANSWER, ANSWER), answer)
    return PromptRow(replace(sample, messages=sample.messages[:end], loss=sample.loss[:end]), columns)
