"""Alpaca's `instruction` and `input` with `chosen` and `rejected`, or with both in a list `output`: [chosen,
rejected]."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.alpaca import parse as parse_alpaca
from megaswift.data.preference.rows import PreferenceExample, make_pair, number_in_column
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, describe_value, text_in_column
from megaswift.options.tasks import PAIRS

OPTIONAL = ("input", "history", "system", "tools", "margin")


def _answered(row: Row, answer: Any) -> UntokenizedSample:
    return parse_alpaca({**row, "output": answer})


def parse(row: Row) -> PreferenceExample:
    """The same question with either answer."""
    chosen, rejected = (_answered(row, text_in_column(row, c)) for c in ("chosen", "rejected"))
    return make_pair(chosen, rejected, number_in_column(row), ("chosen", "rejected"))


def parse_output_pair(row: Row) -> PreferenceExample:
    """The same, from a list of two."""
    answers = row["output"]
    if len(answers) != 2 or not all(isinstance(a, str) for a in answers):
        raise RowError("output", describe_value(answers), "[chosen, rejected], two strings")
    chosen, rejected = (_answered(row, a) for a in answers)
    return make_pair(chosen, rejected, number_in_column(row), ("output[0]", "output[1]"))


def _list(row: Row) -> bool:
    return isinstance(row["output"], list)


FORMATS.register(
    "alpaca preference",
    RowFormat("alpaca preference", ("instruction", "chosen", "rejected"), parse, OPTIONAL, PAIRS, rank=-4),
)
FORMATS.register(
    "alpaca preference (list)",
    RowFormat("alpaca preference", ("instruction", "output"), parse_output_pair, OPTIONAL, PAIRS, _list, rank=-4),
)
