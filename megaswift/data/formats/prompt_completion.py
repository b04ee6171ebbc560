"""`prompt`, `completion`: two texts, trained as they stand, or messages. Loss on the completion alone. As in TRL, for
SFT."""

from __future__ import annotations

from dataclasses import replace

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    describe_value,
    reject_chat_only_columns,
    text_in_column,
    text_or_messages_in_column,
)
from megaswift.options.tasks import SFT


def parse(row: Row) -> UntokenizedSample:
    """The prompt and what follows it."""
    prompt = text_or_messages_in_column(row, "prompt")
    completion = text_or_messages_in_column(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        reject_chat_only_columns(row)
        if not prompt:
            raise RowError(
                "prompt", "an empty prompt", "text before the completion; for text without prompts: megaswift pt"
            )
        return UntokenizedSample(text=prompt + completion, prompt=prompt)
    before = (
        checked_conversation_sample([{"role": "user", "content": prompt}], "prompt")
        if isinstance(prompt, str)
        else prompt
    )
    if isinstance(completion, str):
        after = checked_conversation_sample([{"role": "assistant", "content": completion}], "completion")
    else:
        after = completion
    if not any(m["role"] == "assistant" for m in after.messages):
        raise RowError("completion", describe_value(row["completion"]), "assistant messages")
    joined = checked_conversation_sample(
        [*before.messages, *after.messages], "prompt", text_in_column(row, "system", True), row.get("tools")
    )
    flags = (*(False if m["role"] == "assistant" else None for m in before.messages), *after.loss)
    return replace(joined, loss=(None,) * (len(joined.messages) - len(flags)) + flags)


FORMATS.register(
    "prompt, completion",
    RowFormat("prompt, completion", ("prompt", "completion"), parse, ("system", "tools"), SFT, rank=6, common=True),
)
