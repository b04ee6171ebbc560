"""What a reward is given: a completion with its prompt and the row's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_Message = Mapping[str, Any]
PromptOrCompletion = str | Sequence[_Message]
"""A text, or messages where the row's prompt was messages."""


@dataclass(frozen=True)
class RewardInput:
    """A completion and all that a reward may know of it."""

    prompt: PromptOrCompletion
    completion: PromptOrCompletion
    """In the prompt's form: a text, or `[{"role": "assistant", "content": ...}]`, with tools' turns between in a longer
    one."""
    token_ids: Sequence[int]
    """The completion's, the stop token included."""
    finished: bool
    """False: cut off at the longest completion."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    own: Sequence[bool] | None = None
    """Which of `token_ids` the model wrote, as tools write too; None: all."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return len(self.token_ids) if self.own is None else sum(self.own)

    @property
    def text(self) -> str:
        """The model's answer: the completion, or what it said last."""
        if isinstance(self.completion, str):
            return self.completion
        replies = [m for m in self.completion if m.get("role", "assistant") == "assistant"]
        content = replies[-1].get("content") if replies else ""
        if isinstance(content, str) or content is None:
            return content or ""
        return "".join(part.get("text", "") for part in content)
