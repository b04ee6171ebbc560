"""Rows to prompts: tokens up to where the model speaks, and beside them what the row says and its other columns.

Owns what of a row is kept for rewards, as JSON. Which columns are the question is `questions.py`'s, tokenising
`encode.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaswift.data.chat import Rendered
from megaswift.data.encode import Encoder, EncodeSpec
from megaswift.data.images import no_images
from megaswift.data.questions import question_of
from megaswift.data.sample import RowError, with_system


@dataclass(frozen=True)
class Asked(Rendered):
    """The text of a prompt, which carries no loss."""

    plain: bool
    """Without a chat template: what the tokenizer puts before a text is missing."""
    beside: str
    """{"said", "columns", "tools"} as JSON."""


class PromptEncoder(Encoder):
    """Turns located rows into the tokens of prompts."""

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        self.keeps = True

    def located(self, path: str, row: Any) -> Rendered:
        """The prompt of a row; RowError when it has none."""
        row = self.named(row)
        question = question_of(row, self.spec.task, self.spec.columns)
        no_images(row, question.sample)
        sample = with_system(question.sample, self.spec.system)
        if sample.text is not None and self.spec.system:
            raise RowError(
                "prompt",
                "a text, which goes to the model without a chat template; --system has no place in it",
                "messages, or no --system",
            )
        if sample.text is None and self._chat is None:
            raise RowError(
                "messages", "the tokenizer has no chat template", "--chat_template FILE.jinja, or a text in prompt"
            )
        said: Any = sample.text
        text = sample.text
        if text is None:
            assert self._chat is not None
            said, text = sample.messages, self._chat.prompt(sample)
        # dates and the like as text
        beside = json.dumps({"said": said, "columns": question.columns, "tools": sample.tools}, default=str)
        return Asked(text, (), sample.text is not None, beside)

    def tokenize(self, rendered: Sequence[Rendered]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], uint8 mask [n], all 0) of each prompt."""
        begin = np.array(self.spec.begin, dtype=np.int32)
        for asked, (ids, mask) in zip(rendered, super().tokenize(rendered), strict=True):
            assert isinstance(asked, Asked)
            if asked.plain and len(begin) and (not len(ids) or ids[0] != begin[0]):  # else the row brings it along
                ids, mask = np.concatenate([begin, ids]), np.zeros(len(begin) + len(ids), dtype=np.uint8)
            yield ids, mask
