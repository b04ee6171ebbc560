"""`conversations` up to the question, and `chosen` and `rejected`: one message each ({"from", "value"}), or the
answer's messages."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.conversations import parse as parse_conversations
from megaswift.data.preference.rows import PreferenceExample, make_pair, number_in_column
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    decode_json_cell,
    describe_value,
)
from megaswift.options.tasks import PAIRS

TURN = 'an object {"from": "gpt", "value": ...}, or a list of such'


def _turns(value: Any, column: str) -> list[Any]:
    """The messages in a column: a text is the assistant's."""
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return [{"from": "gpt", "value": value}]
    value = decode_json_cell(value, column, TURN)
    if not isinstance(value, (list, dict)) or not value:
        raise RowError(column, describe_value(value), TURN)
    return [value] if isinstance(value, dict) else value


def _answered(row: Row, column: str) -> UntokenizedSample:
    prompt = parse_conversations(row)
    answer = parse_conversations({"conversations": _turns(row[column], column)})
    return UntokenizedSample(prompt.messages + answer.messages, prompt.loss + answer.loss, prompt.tools)


def parse(row: Row) -> PreferenceExample:
    """The same conversation with either answer."""
    return make_pair(
        _answered(row, "chosen"), _answered(row, "rejected"), number_in_column(row), ("chosen", "rejected")
    )


FORMATS.register(
    "sharegpt preference",
    RowFormat(
        "sharegpt preference",
        ("conversations", "chosen", "rejected"),
        parse,
        ("tools", "system", "margin"),
        PAIRS,
        rank=-4,
    ),
)
