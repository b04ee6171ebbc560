"""Tool calls in answers of models that were trained with an `--agent_template` that is text (`react_en`, `qwen_en`).

Owns finding the calls in an answer and how OpenAI's API writes them, streamed too. How calls are written for training
belongs to `data/templates/agent_text.py`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from megaswift.data.templates.agent_instructions import AgentTextFormat
from megaswift.inference.generator import Answer, TokenLogprob
from megaswift.serve.openai_responses import ChatResponseWriter, finish_reason

BROKEN = 32
"""Calls of an answer whose arguments are no JSON; those of later ones are not tried, since each costs time in
proportion to the rest of the answer."""
_SPACE = re.compile(r"\s*")


class ParsedToolCall(NamedTuple):
    """One call; `arguments` is JSON text, or what the model wrote in its place."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallParser:
    """Finds calls of the request's tools. A text that calls none of them is an answer like any other."""

    form: AgentTextFormat
    names: frozenset[str]
    most: int | None = None
    """Calls of one answer; None: any number."""

    def parse(self, text: str, cut: bool) -> tuple[str, list[ParsedToolCall]]:
        """(what stands outside of the calls, the calls). `cut`: the answer ended at its maximum length, so that a last
        call without whole arguments is none."""
        broken: list[int] = []
        begin = text.find(self.form.action)
        while begin >= 0 and (found := self._call(text, begin, cut, broken)) is None:
            begin = text.find(self.form.action, begin + 1)
        if begin < 0:
            return text, []
        calls = []
        at = begin
        while (found := self._call(text, at, cut, broken)) is not None:
            call, end = found
            calls.append(call)
            at = _behind_space(text, end)
        outside = [text[:begin].rstrip(), text[at:].rstrip().removesuffix(self.form.result).strip()]
        return "\n".join(filter(None, outside)), calls[: self.most]

    def _call(self, text: str, at: int, cut: bool, broken: list[int]) -> tuple[ParsedToolCall, int] | None:
        """The call that begins at `at`, and where it ends; places of arguments that are no JSON go to `broken`."""
        if not text.startswith(self.form.action, at):
            return None
        named = at + len(self.form.action)
        newline = text.find("\n", named, named + self._longest)
        if newline < 0 or (name := text[named:newline].strip()) not in self.names:
            return None
        given = _behind_space(text, newline)
        if not text.startswith(self.form.arguments, given):
            return None
        begin = _behind_space(text, given + len(self.form.arguments))
        value: Any = None
        end = begin
        if len(broken) < BROKEN:
            try:
                value, end = json.JSONDecoder().raw_decode(text, begin)
            except (ValueError, RecursionError):
                broken.append(begin)
        if isinstance(value, dict):
            return ParsedToolCall(name, text[begin:end]), end
        following = self._words.search(text, begin)
        end = following.start() if following else len(text)
        if cut and end == len(text):
            return None
        return ParsedToolCall(name, text[begin:end].strip() or "{}"), end

    @cached_property
    def _words(self) -> re.Pattern[str]:
        """What ends arguments that are no JSON."""
        return re.compile("|".join(map(re.escape, (self.form.action, self.form.result))))

    @cached_property
    def _longest(self) -> int:
        """Characters of the line of a name, with room for blanks around it."""
        return max(map(len, self.names), default=0) + 1024

    def shown(self, text: str) -> str:
        """As much of the beginning of an answer as no call can change."""
        begin = text.find(self.form.action)
        if begin < 0:
            word = self.form.action
            begin = len(text) - next((n for n in range(len(word) - 1, 0, -1) if text.endswith(word[:n])), 0)
        return text[:begin].rstrip()


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _finish_reason(answer: Answer) -> str:
    """The finish reason of an answer with calls."""
    return "length" if finish_reason(answer) == "length" else "tool_calls"


def _call_json(call: ParsedToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCallResponseWriter(ChatResponseWriter):
    """Writes answers to a request with tools. Streamed, text comes as it is generated and calls come at the end."""

    parser: ToolCallParser = field(kw_only=True)
    _texts: dict[int, str] = field(default_factory=dict, init=False)
    """By choice: the text up to now."""

    def whole(self, answers: Sequence[Answer], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one."""
        body = super().whole(answers, counts)
        for choice, answer in zip(body["choices"], answers, strict=True):
            text, calls = self._parsed(answer)
            choice["message"]["content"] = text or (None if calls else "")
            if calls:
                choice["message"]["tool_calls"] = [_call_json(call) for call in calls]
                choice["finish_reason"] = _finish_reason(answer)
        return body

    def _parsed(self, answer: Answer) -> tuple[str, list[ParsedToolCall]]:
        return self.parser.parse(answer.text, finish_reason(answer) == "length")

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Some more text, without what may be a call; None where nothing is left to say."""
        known = self._texts.get(index, "")
        self._texts[index] = known + text
        fresh = self.parser.shown(known + text).removeprefix(self.parser.shown(known))
        return super().piece(index, fresh, entries) if fresh or self.logprobs else None

    def last(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """What was held back, the calls, and why a choice ended."""
        text, calls = self._parsed(answer)
        rest = text.removeprefix(self.parser.shown(self._texts.get(index, "")))
        chunks = [self._chunk(index, {"content": rest}, None, None)] if rest else []
        if not calls:
            return [*chunks, *super().last(index, answer)]
        listed = [{"index": i, **_call_json(call)} for i, call in enumerate(calls)]
        end = self._chunk(index, {}, None, _finish_reason(answer))
        return [*chunks, self._chunk(index, {"tool_calls": listed}, None, None), end]
