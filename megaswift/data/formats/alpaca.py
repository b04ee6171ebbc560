"""`instruction`, `input`, `output`, as Stanford Alpaca has them: the input follows the instruction on a new line."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.query_response import history_messages
from megaswift.data.untokenized_sample import (
    UntokenizedSample,
    checked_conversation_sample,
    text_in_column,
)


def parse(row: Row) -> UntokenizedSample:
    """The question is the instruction and, where it is not empty, the input below it."""
    question = "\n".join(
        t for t in (text_in_column(row, "instruction"), text_in_column(row, "input", optional=True)) if t
    )
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
