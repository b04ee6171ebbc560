"""A conversation in any form of SFT and `label`: whether its answer is desirable. As ms-swift has it for KTO."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.formats.rejected_response import has_sft_conversation, read_sft_conversation
from megaswift.data.preference.rows import PreferenceExample, label_in_column, make_labeled_example
from megaswift.options.tasks import EXAMPLES


def parse(row: Row) -> PreferenceExample:
    """The completion is what follows the last question."""
    return make_labeled_example(read_sft_conversation(row), label_in_column(row), "messages")


FORMATS.register(
    "messages + label",
    RowFormat(
        "messages + label", ("label",), parse, ("tools", "system"), EXAMPLES, has_sft_conversation, 6, ("messages",)
    ),
)
