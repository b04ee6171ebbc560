"""`instruction`, `input`, `output`, as Stanford Alpaca has them: the input follows the instruction on a new line."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Format, Row
from megaswift.data.formats.query_response import rounds
from megaswift.data.sample import Sample, conversation, string


def parse(row: Row) -> Sample:
    """The question is the instruction and, where it is not empty, the input below it."""
    question = "\n".join(t for t in (string(row, "instruction"), string(row, "input", optional=True)) if t)
    messages = rounds(row) + [
        {"role": "user", "content": question},
        {"role": "assistant", "content": string(row, "output")},
    ]
    return conversation(messages, "instruction", string(row, "system", optional=True), row.get("tools"))


FORMATS.register("alpaca", Format("alpaca", ("instruction", "output"), parse, ("input", "history", "system"), rank=4))
