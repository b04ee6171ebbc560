"""`query`, `response` and, when there were rounds before, `history`: [[query, response], ...]; `system`."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Format, Row
from megaswift.data.sample import RowError, Sample, conversation, decoded, describe, string


def rounds(row: Row) -> list[dict[str, Any]]:
    """The messages of `history`."""
    history = decoded(row.get("history") or [], "history", "a list of [query, response]")
    if not isinstance(history, list):
        raise RowError("history", describe(history), "a list of [query, response]")
    messages: list[dict[str, Any]] = []
    for i, pair in enumerate(history):
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(t, str) for t in pair)):
            raise RowError(f"history[{i}]", describe(pair), "[query, response], two strings")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def parse(row: Row) -> Sample:
    """History, then the query and its response."""
    messages = rounds(row) + [
        {"role": "user", "content": string(row, "query")},
        {"role": "assistant", "content": string(row, "response")},
    ]
    return conversation(messages, "query", string(row, "system", optional=True), row.get("tools"))


FORMATS.register(
    "query_response", Format("query_response", ("query", "response"), parse, ("history", "system", "tools"), rank=3)
)
