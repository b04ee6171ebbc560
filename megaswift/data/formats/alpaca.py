"""The columns of Stanford Alpaca: `instruction`, `input`, `output`."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.query_response import history_messages
from megaswift.data.untokenized_sample import (
    UntokenizedSample,
    checked_conversation_sample,
    text_in_column,
)


def parse(row: Row) -> UntokenizedSample:
    """Return a conversation whose question is the instruction, followed on a new line by the input, if there is
    any."""
    parts = (text_in_column(row, "instruction"), text_in_column(row, "input", optional=True))
    question = "\n".join(text for text in parts if text)
    messages = history_messages(row) + [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_in_column(row, "output")},
    ]
    return checked_conversation_sample(
        messages, "instruction", text_in_column(row, "system", optional=True), row.get("tools")
    )


FORMATS.register(
    "alpaca", RowFormat("alpaca", ("instruction", "output"), parse, ("input", "history", "system"), rank=4)
)
