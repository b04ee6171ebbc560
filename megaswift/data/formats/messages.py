"""`messages`: [{"role", "content", "tool_calls"?, "loss"?}], the form that chat templates take."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.conversations import sample_of_turns
from megaswift.data.untokenized_sample import UntokenizedSample


def parse(row: Row) -> UntokenizedSample:
    """The messages as they are; turns of ShareGPT become messages."""
    return sample_of_turns(row, "messages")


FORMATS.register("messages", RowFormat("messages", ("messages",), parse, ("tools", "system")))
