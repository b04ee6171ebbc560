"""Encodes rows as prompts: tokens up to the assistant's turn, and the columns that reward functions read.

Owns what of a row is kept for rewards, as JSON. Which columns are the question is `prompt_rows.py`'s, tokenizing
`encode_rows.py`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megaswift.data.attach_and_open_row_images import reject_images
from megaswift.data.encode_rows import EncodeSpec, RowEncoder, reject_lone_surrogates
from megaswift.data.prompt_rows import split_prompt_row
from megaswift.data.render_chat_with_loss_spans import RenderedConversation
from megaswift.data.untokenized_sample import RowError, with_default_system_message


@dataclass(frozen=True, kw_only=True)
class RenderedPrompt(RenderedConversation):
    """The text of a prompt, which carries no loss."""

    beside: str
    """{"said", "columns", "tools"} as JSON."""


class PromptEncoder(RowEncoder):
    """Turns located rows into the tokens of prompts."""

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        self.keeps = True

    def located(self, path: str, row: Any) -> RenderedConversation:
        """The prompt of a row; RowError when it has none."""
        row = self.named(row)
        question = split_prompt_row(row, self.spec.task, self.spec.columns)
        reject_images(row, question.sample)
        sample = with_default_system_message(question.sample, self.spec.system)
        if sample.text is not None and self.spec.system:
            raise RowError(
                "prompt",
                "plain text, which is used without a chat template, so --system cannot be applied",
                "messages, or omit --system",
            )
        if sample.text is None and self._chat is None:
            raise RowError(
                "messages", "the tokenizer has no chat template", "--chat_template FILE.jinja, or plain text in prompt"
            )
        content: Any = sample.text
        text = sample.text
        notes: tuple[str, ...] = ()
        if text is None:
            assert self._chat is not None
            content, text, notes = sample.messages, self._chat.prompt(sample), self._chat.prompt_notes(sample)
            reject_lone_surrogates(text)
        # dates and the like as text
        beside = json.dumps({"said": content, "columns": question.columns, "tools": sample.tools}, default=str)
        return RenderedPrompt(text, (), notes=notes, plain=sample.text is not None, beside=beside)
