"""A conversation in any form of SFT and `label`: whether its answer is desirable. As ms-swift has it for KTO."""

from __future__ import annotations

from megaswift.config.data import EXAMPLES
from megaswift.data.formats import FORMATS, Format, Row
from megaswift.data.formats.rejected_response import conversation_of, is_chat
from megaswift.data.preference import Unit, example, truth


def parse(row: Row) -> Unit:
    """The completion is what follows the last question."""
    return example(conversation_of(row), truth(row), "messages")


FORMATS.register(
    "messages + label",
    Format("messages + label", ("label",), parse, ("tools", "system"), EXAMPLES, is_chat, 6, ("messages",)),
)
