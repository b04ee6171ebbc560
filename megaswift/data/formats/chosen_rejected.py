"""`prompt`, `chosen`, `rejected` (or `prompt`, `completion`, `label`), as TRL has them: texts or messages.

Texts are taken as they are, without a chat template, and end with the end-of-text token. Messages go through the
template. Without `prompt`, the prompt is what `chosen` and `rejected` begin with alike; a `prompt` beside whole
conversations plays no part.
"""

from __future__ import annotations

from os.path import commonprefix

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.preference.rows import (
    PreferenceExample,
    label_in_column,
    make_labeled_example,
    make_pair,
    make_plain_text_preference_example,
    number_in_column,
)
from megaswift.data.untokenized_sample import (
    UntokenizedSample,
    checked_conversation_sample,
    reject_chat_only_columns,
    text_in_column,
    text_or_messages_in_column,
    with_default_system_message,
)
from megaswift.options.tasks import EXAMPLES, PAIRS


def _said(value: str | UntokenizedSample, role: str) -> UntokenizedSample:
    return UntokenizedSample(({"role": role, "content": value},), (None,)) if isinstance(value, str) else value


def _joined(row: Row, prompt: str | UntokenizedSample | None, answer: str | UntokenizedSample) -> UntokenizedSample:
    """The whole conversation that an answer belongs to."""
    sample = _said(answer, "assistant")
    if prompt is not None and not _whole(answer):
        before = _said(prompt, "user")
        sample = UntokenizedSample(before.messages + sample.messages, before.loss + sample.loss)
    tools = checked_conversation_sample([{"role": "user", "content": ""}], "tools", None, row.get("tools")).tools
    return with_default_system_message(
        UntokenizedSample(sample.messages, sample.loss, tools), text_in_column(row, "system", optional=True)
    )


def _whole(answer: str | UntokenizedSample) -> bool:
    """Whether an answer brings its prompt along."""
    return isinstance(answer, UntokenizedSample) and answer.messages[0]["role"] in ("system", "developer", "user")


def parse(row: Row) -> PreferenceExample:
    """A pair."""
    prompt = None if row.get("prompt") is None else text_or_messages_in_column(row, "prompt")
    chosen = text_or_messages_in_column(row, "chosen")
    rejected = text_or_messages_in_column(row, "rejected")
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, UntokenizedSample):
        if prompt is None:  # TRL's rule: the space before the first different word belongs to the answers
            prompt = commonprefix([chosen, rejected])
            if chosen != rejected:
                prompt = prompt.removesuffix(" ")
            chosen = chosen[len(prompt) :]
            rejected = rejected[len(prompt) :]
        reject_chat_only_columns(row)
        return make_plain_text_preference_example(
            prompt, {"chosen": chosen, "rejected": rejected}, number_in_column(row)
        )
    return make_pair(
        _joined(row, prompt, chosen), _joined(row, prompt, rejected), number_in_column(row), ("chosen", "rejected")
    )


def parse_conversations(row: Row) -> PreferenceExample:
    """A pair of whole conversations, as LLaMA-Factory v1 has them."""
    return parse({**row, "chosen": row["chosen_messages"], "rejected": row["rejected_messages"]})


def parse_labeled(row: Row) -> PreferenceExample:
    """A labeled completion."""
    prompt = text_or_messages_in_column(row, "prompt")
    answer = text_or_messages_in_column(row, "completion")
    if isinstance(prompt, str) and isinstance(answer, str):
        reject_chat_only_columns(row)
        return make_plain_text_preference_example(prompt, {"completion": answer}, label_in_column(row))
    sample = _joined(row, prompt, answer)
    begin = None if _whole(answer) else len(sample.messages) - len(_said(answer, "assistant").messages)
    return make_labeled_example(sample, label_in_column(row), "completion", begin)


FORMATS.register(
    "prompt, chosen, rejected",
    RowFormat(
        "prompt, chosen, rejected",
        ("chosen", "rejected"),
        parse,
        ("prompt", "margin", "tools", "system"),
        PAIRS,
        rank=-3,
    ),
)
FORMATS.register(
    "chosen_messages, rejected_messages",
    RowFormat(
        "chosen_messages, rejected_messages",
        ("chosen_messages", "rejected_messages"),
        parse_conversations,
        ("margin", "tools", "system"),
        PAIRS,
        rank=-3,
    ),
)
FORMATS.register(
    "prompt, completion, label",
    RowFormat(
        "prompt, completion, label",
        ("prompt", "completion", "label"),
        parse_labeled,
        ("tools", "system"),
        EXAMPLES,
        rank=-3,
    ),
)
