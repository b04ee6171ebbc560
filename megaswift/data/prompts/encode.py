"""Encodes rows as prompts: tokens up to the assistant's turn, and the columns that reward functions read.

Owns what of a row is kept for rewards, as JSON. Which columns are the question is `rows.py`'s, tokenizing
`encode/rows.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaswift.data.encode.rows import EncodeSpec, RowEncoder, reject_lone_surrogates
from megaswift.data.prompts.rows import PromptRow, split_prompt_row
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, with_default_system_message
from megaswift.data.vision.encode import VisionRowTokenEncoder
from megaswift.data.vision.media import IMAGE, VIDEO, RowMedia
from megaswift.data.vision.placeholders import COLUMNS, reject_media, reject_media_beside_plain_text


@dataclass(frozen=True, kw_only=True)
class RenderedPrompt(RenderedConversation):
    """The text of a prompt, which carries no loss."""

    beside: str
    """{"said", "columns", "tools"} as JSON; of a prompt with images {"text", "files", "end"} too."""
    ids: np.ndarray | None = None
    """int32 [n]: of a model that reads images, the processor's tokens."""


class PromptEncoder(RowEncoder):
    """Turns located rows into the tokens of prompts."""

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        self.keeps = True
        self._vision = None if spec.processor is None else VisionRowTokenEncoder(spec)

    def located(self, path: str, row: Any) -> RenderedConversation:
        """The prompt of a row; RowError when it has none."""
        row = self.named(row)
        question = split_prompt_row(row, self.spec.task, self.spec.columns)
        if self._vision is None:
            reject_media(row, question.sample, self.spec.text_part)
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
        if self._vision is not None:
            if sample.text is None:
                return self._with_images(self._vision, path, row, replace(question, sample=sample))
            reject_media_beside_plain_text(row, sample)
        content: Any = sample.text
        text = sample.text
        notes: tuple[str, ...] = ()
        if text is None:
            assert self._chat is not None
            content = sample.messages
            text = self._chat.prompt(sample)
            notes = self._chat.prompt_notes(sample)
            reject_lone_surrogates(text)
        beside = _beside(content, question.columns, sample)
        return RenderedPrompt(text, (), notes=notes, plain=sample.text is not None, beside=beside)

    def _with_images(
        self, vision: VisionRowTokenEncoder, path: str, row: dict[str, Any], question: PromptRow
    ) -> RenderedPrompt:
        """A prompt for a model that reads images, which rewards see as the paths of their files."""
        sample, found = vision.prompt_with_images(path, row, question.sample)
        images = json.loads(found.beside) if found.beside else {}
        media = RowMedia.from_dict(images)
        shown = {IMAGE: [*media.images], VIDEO: [video.named for video in media.videos]}
        files = {
            name: shown[kind] for kind in COLUMNS for name in COLUMNS[kind] if name in question.columns and shown[kind]
        }
        beside = _beside(sample.messages, question.columns | files, sample, images)
        return RenderedPrompt(found.text, (), notes=found.notes, beside=beside, ids=found.ids)

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], loss weights [n], all 0) of each prompt."""
        if self._vision is None:
            yield from super().tokenize(rendered)
            return
        for row in rendered:
            if isinstance(row, RenderedPrompt) and row.ids is not None:
                yield row.ids, np.zeros(len(row.ids), dtype=np.uint8)
            else:
                yield from super().tokenize([row])


def _beside(
    content: Any, columns: dict[str, Any], sample: UntokenizedSample, images: dict[str, Any] | None = None
) -> str:
    """Return the columns that a prompt keeps, as JSON; dates and the like become text."""
    kept = {"said": content, "columns": columns, "tools": sample.tools, **(images or {})}
    return json.dumps(kept, default=str)
