"""ms-swift's preference formats: a conversation in any SFT format, which ends with the chosen answer, and the rejected
answer.

`rejected_response` is a string that replaces the last assistant message. `rejected_messages` is the whole rejected
conversation, or only the messages of the rejected answer. Both may have a `margin`.
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
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    text_in_column,
    with_default_system_message,
)
from megaswift.options.tasks import PAIRS


def read_sft_conversation(row: Row) -> UntokenizedSample:
    """Return the conversation of a row, read as an SFT row without its preference columns."""
    sft_row = {k: v for k, v in row.items() if k not in COLUMNS}
    sample = parse_sample(sft_row, "sft")
    if sample.text is not None:
        raise RowError(", ".join(sft_row), "plain text", "a conversation, such as messages")
    return sample


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
    """Return the pair of a row whose `rejected_response` replaces the last assistant message."""
    chosen = _chosen(row)
    answer: dict[str, Any] = {"role": "assistant", "content": text_in_column(row, "rejected_response", optional=True)}
    loss = (*chosen.loss[:-1], loss_flag(chosen.loss[-1]))  # a loss weight of the chosen answer is not for this one
    rejected = replace(chosen, messages=(*chosen.messages[:-1], answer), loss=loss)
    return make_pair(chosen, rejected, number_in_column(row), ("messages", "rejected_response"))


def parse_rejected_messages(row: Row) -> PreferenceExample:
    """Return the pair of a row with `rejected_messages`: a conversation, or an answer to the chosen one's last
    question if it begins with the assistant and the chosen one does not."""
    chosen = _chosen(row)
    rejected = checked_conversation_sample(row["rejected_messages"], "rejected_messages")
    roles = [m["role"] for m in chosen.messages]
    if rejected.messages[0]["role"] == "assistant" and roles[0] != "assistant":
        answer_at = max(i for i, role in enumerate(roles) if role in ASKING) + 1
        rejected = UntokenizedSample(
            chosen.messages[:answer_at] + rejected.messages, chosen.loss[:answer_at] + rejected.loss
        )
    else:
        rejected = with_default_system_message(rejected, text_in_column(row, "system", optional=True))
    return make_pair(
        chosen, replace(rejected, tools=chosen.tools), number_in_column(row), ("messages", "rejected_messages")
    )


def has_sft_conversation(row: Row) -> bool:
    """Return whether a row without its preference columns has the columns of an SFT format."""
    columns = {k for k, v in row.items() if v is not None and k not in COLUMNS}
    return any(columns.issuperset(f.required) and "sft" in f.tasks and f.name != "text" for f in FORMATS)


FORMATS.register(
    "messages + rejected_response",
    RowFormat(
        "messages + rejected_response",
        ("rejected_response",),
        parse,
        ("margin", "tools", "system"),
        tasks=PAIRS,
        detect=has_sft_conversation,
        rank=-2,
        beside=("messages",),
    ),
)
FORMATS.register(
    "messages + rejected_messages",
    RowFormat(
        "messages + rejected_messages",
        ("rejected_messages",),
        parse_rejected_messages,
        ("margin", "tools", "system"),
        tasks=PAIRS,
        detect=has_sft_conversation,
        rank=-1,
        beside=("messages",),
    ),
)
