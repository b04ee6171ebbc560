"""Conversations to the tokens that a model answers.

Owns rendering for an answer and the limit of the context. Reading rows of files is `rows.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from megaswift.errors import ConfigError, Problem
from megaswift.inference.load import Prepared


class PromptError(Exception):
    """A conversation that cannot be answered; the text says why."""


class Prompts:
    """Renders with the tokenizer's chat template."""

    def __init__(self, prepared: Prepared, system: str | None) -> None:
        self.tokenizer, self.context, self.system = prepared.tokenizer, prepared.context, system
        self._name = str(prepared.options.model)

    def need_template(self) -> None:
        """ConfigError where the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(Problem(f"the tokenizer of {self._name}", "has no chat template",
                                      "--chat_template FILE.jinja; a base model continues the `text` of a file's rows"))

    def of_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]:
        """Tokens up to where the assistant speaks."""
        turns = [dict(m) for m in messages]
        if self.system and turns[:1] and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.system})
        for turn in turns:
            if isinstance(turn.get("content"), list):
                turn["content"] = _text(turn["content"])
        try:
            ids = self.tokenizer.apply_chat_template(turns, tools=list(tools) if tools else None, add_generation_prompt=True,
                                                     tokenize=True, return_dict=True)["input_ids"]
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:  # whatever a template's expressions raise
            raise PromptError(f"the chat template refuses this conversation ({error})") from None
        return self._checked(ids)

    def of_any(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Tokens of a text, or tokens as they are."""
        if isinstance(prompt, str):
            return self.of_text(prompt)
        wrong = [t for t in prompt if not 0 <= t < len(self.tokenizer)]
        if wrong:
            raise PromptError(f"{wrong[0]} is no token of this model; there are {len(self.tokenizer)}")
        return self._checked(prompt)

    def of_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that goes on."""
        return self._checked(self.tokenizer(text)["input_ids"])

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not ids:
            raise PromptError("the prompt has no token")
        if self.context is not None and len(ids) >= self.context:
            raise PromptError(f"the prompt has {len(ids)} tokens, the model takes {self.context} with the answer")
        return tuple(ids)

    def room(self, prompt: Sequence[int], wanted: int) -> int:
        """Tokens that an answer may have: `wanted`, or what the context leaves."""
        return wanted if self.context is None else min(wanted, self.context - len(prompt))


def _text(parts: Sequence[Any]) -> str:
    """Text parts of a content joined; other parts are for models of another kind."""
    other = sorted({str(p.get("type")) if isinstance(p, Mapping) else "?" for p in parts} - {"text"})
    if other:
        raise PromptError(f"parts of type {', '.join(other)} are not read; text is")
    return "".join(str(p.get("text", "")) for p in parts)
