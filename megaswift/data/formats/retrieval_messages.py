"""ms-swift's rows for embedding models and rerankers: `messages` of the query, with lists of `positive_messages` and
`negative_messages`, and a `label` for two texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.groups.rows import UNLABELED, RetrievalExample, Text, make_example, number_of, text_of_messages
from megaswift.data.untokenized_sample import RowError, decode_json_cell, describe_value
from megaswift.options.tasks import RETRIEVAL


def _lists(value: Any, column: str) -> list[Text]:
    if value in (None, "", []):
        return []
    if isinstance(value, str):
        value = decode_json_cell(value, column, "a list of lists of messages")
    if not isinstance(value, Sequence):
        raise RowError(column, describe_value(value), "a list of lists of messages")
    return [text_of_messages(one, f"{column}[{i}]") for i, one in enumerate(value)]


def parse(row: Row) -> RetrievalExample:
    """Return the row's query and documents."""
    label = row.get("label")
    return make_example(
        text_of_messages(row["messages"], "messages"),
        _lists(row["positive_messages"], "positive_messages"),
        _lists(row.get("negative_messages"), "negative_messages"),
        None if label in UNLABELED else number_of(label, "label"),
    )


FORMATS.register(
    "messages + positive_messages",
    RowFormat(
        "messages + positive_messages",
        ("messages", "positive_messages"),
        parse,
        ("negative_messages", "label"),
        tasks=RETRIEVAL,
        rank=-5,
    ),
)
