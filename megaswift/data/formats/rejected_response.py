"""A conversation in any SFT format, whose last answer is the chosen one, and the rejected answer.

`rejected_response`: a string in the last assistant message's place. `rejected_messages`: the whole other conversation,
or the messages of its answer. Both with [`margin`]. As ms-swift has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat, parse_sample
from megaswift.data.preference.rows import (
    ASKING,
    COLUMNS,
    EMPTY,
    PreferenceExample,
    UnusablePreferenceError,
    make_pair,
    number_in_column,
)
from megaswift.data.templates.message_loss import loss_flag
from megaswift.data.untokenized_sample import (
    UntokenizedSample,
    checked_conversation_sample,
    text_in_column,
    with_default_system_message,
)
from megaswift.options.tasks import PAIRS


def read_sft_conversation(row: Row) -> UntokenizedSample:
    """The conversation of a row without the columns of preferences, read as a row of SFT."""
    bare = {k: v for k, v in row.items() if k not in COLUMNS}
    return parse_sample(bare, "sft")


def _chosen(row: Row) -> UntokenizedSample:
    sample = read_sft_conversation(row)
    if sample.messages[-1]["role"] != "assistant":
        raise UnusablePreferenceError(
            EMPTY,
            "messages",
            f"the last message is the {sample.messages[-1]['role']}'s",
            "the chosen completion, an assistant message, at the end",
        )
    return sample


def parse(row: Row) -> PreferenceExample:
    """The rejected text takes the place of the last assistant message."""
    chosen = _chosen(row)
    answer: dict[str, Any] = {"role": "assistant", "content": text_in_column(row, "rejected_response", optional=True)}
    flags = (*chosen.loss[:-1], loss_flag(chosen.loss[-1]))  # the chosen answer's own weight is not this one's
    rejected = replace(chosen, messages=(*chosen.messages[:-1], answer), loss=flags)
    return make_pair(chosen, rejected, number_in_column(row), ("messages", "rejected_response"))


def parse_rejected_messages(row: Row) -> PreferenceExample:
    """Another conversation; one that begins with the assistant follows the last question of the chosen one."""
    chosen = _chosen(row)
    rejected = checked_conversation_sample(row["rejected_messages"], "rejected_messages")
    roles = [m["role"] for m in chosen.messages]
    if rejected.messages[0]["role"] == "assistant" != roles[0]:
        begin = max(i for i, role in enumerate(roles) if role in ASKING) + 1
        rejected = UntokenizedSample(chosen.messages[:begin] + rejected.messages, chosen.loss[:begin] + rejected.loss)
    else:
        rejected = with_default_system_message(rejected, text_in_column(row, "system", optional=True))
    return make_pair(
        chosen, replace(rejected, tools=chosen.tools), number_in_column(row), ("messages", "rejected_messages")
    )


def has_sft_conversation(row: Row) -> bool:
    """Whether a row holds a conversation of SFT beside the columns of preferences."""
    bare = {k for k, v in row.items() if v is not None and k not in COLUMNS}
    return any(bare.issuperset(f.required) and "sft" in f.tasks for f in FORMATS)


FORMATS.register(
    "messages + rejected_response",
    RowFormat(
        "messages + rejected_response",
        ("rejected_response",),
        parse,
        ("margin", "tools", "system"),
        PAIRS,
        has_sft_conversation,
        -2,
        ("messages",),
    ),
)
FORMATS.register(
    "messages + rejected_messages",
    RowFormat(
        "messages + rejected_messages",
        ("rejected_messages",),
        parse_rejected_messages,
        ("margin", "tools", "system"),
        PAIRS,
        has_sft_conversation,
        -1,
        ("messages",),
    ),
)
