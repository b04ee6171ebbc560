"""`query`, `response` and, when there were rounds before, `history`: [[query, response], ...]; `system`."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    decode_json_cell,
    describe_value,
    text_in_column,
)


def history_messages(row: Row) -> list[dict[str, Any]]:
    """The messages of `history`."""
    history = decode_json_cell(row.get("history") or [], "history", "a list of [query, response]")
    if not isinstance(history, list):
        raise RowError("history", describe_value(history), "a list of [query, response]")
    messages: list[dict[str, Any]] = []
    for i, pair in enumerate(history):
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(t, str) for t in pair)):
            raise RowError(f"history[{i}]", describe_value(pair), "[query, response], two strings")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def parse(row: Row) -> UntokenizedSample:
    """History, then the query and its response."""
    messages = history_messages(row) + [
        {"role": "user", "content": text_in_column(row, "query")},
        {"role": "assistant", "content": text_in_column(row, "response")},
    ]
    return checked_conversation_sample(
        messages, "query", text_in_column(row, "system", optional=True), row.get("tools")
    )


FORMATS.register(
    "query_response", RowFormat("query_response", ("query", "response"), parse, ("history", "system", "tools"), rank=3)
)
