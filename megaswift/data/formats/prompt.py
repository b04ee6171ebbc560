"""`prompt`: a text, taken as it is, or messages up to where the model speaks; every other column goes to the rewards.
As TRL has it."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    reject_chat_only_columns,
    text_in_column,
    text_or_messages_in_column,
)
from megaswift.options.tasks import RL


def parse(row: Row) -> UntokenizedSample:
    """The prompt."""
    prompt = text_or_messages_in_column(row, "prompt")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RowError("prompt", "an empty prompt", "text for the model to continue, or messages")
        reject_chat_only_columns(row)
        return UntokenizedSample(text=prompt)
    if prompt.messages[-1]["role"] == "assistant":
        raise RowError(
            "prompt",
            "the last message is the assistant's",
            "a user message at the end; the reference answer in a separate column",
        )
    return checked_conversation_sample(
        prompt.messages, "prompt", text_in_column(row, "system", optional=True), row.get("tools")
    )


FORMATS.register("prompt", RowFormat("prompt", ("prompt",), parse, ("tools", "system"), RL, rank=7, common=True))
