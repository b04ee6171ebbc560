"""`messages`: [{"role", "content", "tool_calls"?, "loss"?}], the form that chat templates take."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    UntokenizedSample,
    checked_conversation_sample,
    text_in_column,
)


def parse(row: Row) -> UntokenizedSample:
    """The messages as they are."""
    return checked_conversation_sample(
        row["messages"], "messages", text_in_column(row, "system", optional=True), row.get("tools")
    )


FORMATS.register("messages", RowFormat("messages", ("messages",), parse, ("tools", "system")))
