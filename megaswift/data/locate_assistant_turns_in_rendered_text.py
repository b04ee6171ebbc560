"""Locates assistant turns in rendered text for chat templates without `{% generation %}`.

A turn is what the assistant wrote (content, reasoning, tool calls) and the token that ends its turn. Templates trim
contents, strip reasoning from earlier turns, move the system message and write headers, so contents cannot be searched
for, and a prefix of the conversation need not be a prefix of the text. Instead the conversation is rendered a second
time with private-use characters at the edges of the contents: where they come out, the contents are. The text without
them must be the text that was asked for, byte for byte; otherwise fewer edges are marked.

Left out: which turns carry loss (`render_chat_with_loss_spans.py`), tokens (`encode_rows.py`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.data.untokenized_sample import RowError

_Message = dict[str, Any]
_Render = Callable[[Sequence[_Message], Any, bool], str]

BASE = 0xF0000
"""First character of Unicode's supplementary private use area A."""
MARKS = re.compile(f"[{chr(BASE)}-{chr(BASE + 0xFFFD)}]")
MARKED_TEMPLATE = "a chat template with {% generation %} around the assistant's turns (--chat_template)"
REASONING = ("reasoning_content", "thinking", "reasoning")
REASONS = "<think>"
EMPTY_BLOCK = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
"""The generation prompt may have brought its beginning."""
REASONING_WORDS = re.compile("think|thought", re.IGNORECASE)
"""In the special tokens of an empty block of reasoning, whatever the model."""
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}


def _start(i: int) -> str:
    return chr(BASE + 2 * i)


def _end(i: int) -> str:
    return chr(BASE + 2 * i + 1)


@dataclass(frozen=True)
class _Marking:
    """What is marked in a second rendering: the more, the more is known, if the template lets it pass."""

    others: bool
    """The ends of users' and tools' contents too."""
    starts: bool
    """The starts of the assistant's contents."""
    outside: bool
    """Marks outside of contents' outer white space: exact, but in the way of templates that trim it."""


_MARKINGS = tuple(
    _Marking(*m)
    for m in (
        (True, True, True),
        (True, True, False),
        (False, True, True),
        (False, True, False),
        (False, False, False),
        (True, False, False),
    )
)


def _mark_text(text: str, i: int, how: _Marking, start: bool) -> str:
    """`text` with marks at its edges, and a start mark after its reasoning too."""
    core = text if how.outside else text.strip()
    if not core.strip():
        return text
    offset = text.index(core)
    lead, trail = text[:offset], text[offset + len(core) :]
    if not start:
        return lead + core + _end(i) + trail
    head, closing, answer = core.rpartition("</think>")
    body = answer.lstrip()
    gap = answer[: len(answer) - len(body)]
    core = head + closing + gap + _start(i) + body if closing else core
    return lead + _start(i) + core + _end(i) + trail


def _marked(message: _Message, i: int, how: _Marking) -> _Message:
    answers = message["role"] == "assistant"
    content = message.get("content")
    if not (answers or (how.others and message["role"] != "system")):
        return message
    if isinstance(content, str):
        return {**message, "content": _mark_text(content, i, how, answers and how.starts)}
    if isinstance(content, list) and len(texts := [p for p in content if p.get("type") == "text"]) == 1:
        part = {**texts[0], "text": _mark_text(texts[0]["text"], i, how, answers and how.starts)}
        return {**message, "content": [part if p is texts[0] else p for p in content]}
    return message


def _has_reasoning(message: _Message) -> bool:
    content = message.get("content")
    return any(message.get(k) for k in REASONING) or (isinstance(content, str) and "</think>" in content)


def _trailing(message: _Message) -> str:
    content = message.get("content")
    return content[len(content.rstrip()) :] if isinstance(content, str) else ""


def _behind_opening(text: str, opening: str, at: int) -> int:
    """The position behind `opening`, what a template writes where an answer is to begin; -1 where it does not stand at
    `at`. The beginning of a reasoning block in it (Qwen3.5) need not stand before every answer."""
    for written in (opening, opening.partition(REASONS)[0]):
        if text.startswith(written, at):
            return at + len(written)
    return -1


def _behind_empty_block(message: _Message, text: str, begin: int) -> int:
    """Where a turn begins behind an empty block of reasoning that the template itself writes, as before a tool call
    without content."""
    block = None if _has_reasoning(message) else EMPTY_BLOCK.match(text, begin)
    return block.end() if block else begin


class AssistantTurnFinder:
    """Finds assistant turns for one template; what the template writes around turns is learnt once."""

    def __init__(self, render: _Render, end_tokens: Sequence[str]) -> None:
        self._render = render
        self._specials = sorted((t for t in end_tokens if t), key=len, reverse=True)
        self._tails: dict[str, str] = {}
        self.header = self._learn_header()
        self.ends = self._learn_ends()

    def _try(self, messages: Sequence[_Message], prompt: bool = False) -> str | None:
        try:
            return self._render(messages, None, prompt)
        except RowError:
            return None

    def _learn_header(self) -> str:
        """What the template writes where an answer is to begin: its generation prompt, or nothing."""
        ask = [{"role": "user", "content": "x"}]
        plain, prompted = self._try(ask), self._try(ask, True)
        return (
            prompted[len(plain) :] if plain is not None and prompted is not None and prompted.startswith(plain) else ""
        )

    def _tail(self, role: str) -> str | None:
        """What stands between the end of a `role` message's content and the beginning of an answer."""
        if role not in self._tails:
            probe: list[_Message] = [{"role": role, "content": "x" + _end(0)}]
            if role not in ("user", "system", "developer"):
                probe = [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                    {**probe[0], "name": "f", "tool_call_id": "abcdefghi"},
                ]
            text = self._try(probe, True)
            self._tails[role] = text.rpartition(_end(0))[2] if text and _end(0) in text else "\0"
        return None if self._tails[role] == "\0" else self._tails[role]

    def _first_special(self, text: str, begin: int = 0) -> str | None:
        candidates = [(text.find(t, begin), -len(t), t) for t in self._specials]
        return min((f for f in candidates if f[0] >= 0), default=(0, 0, None))[2]

    def _learn_ends(self) -> tuple[str, ...]:
        """The texts that end an assistant's turn, each one or more tokens: in the last place, after a tool call, and in
        the middle."""
        ask, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y" + _end(0)}
        last = self._try([ask, answer]) or ""
        after = last.rpartition(_end(0))[2]
        ending = self._first_special(after)
        if ending is None:
            return ()
        place = after.index(ending)
        ends = [ending, self._specials_at(after, place)]
        middle = (self._try([ask, answer, ask]) or "").rpartition(_end(0))[2]
        other = self._first_special(middle)
        if other is not None and middle.index(other) == place and middle[:place] == after[:place]:
            ends.append(other)
        calling = self._try([ask, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]) or ""
        ends += [t for t in self._specials if calling.rstrip().endswith(t)][:1]
        return tuple(dict.fromkeys(ends))

    def _specials_at(self, text: str, begin: int) -> str:
        """The special tokens that stand at `begin`, one right after the other, as Cohere's models end a turn."""
        end = begin
        while token := next((t for t in self._specials if text.startswith(t, end)), ""):
            end += len(token)
        return text[begin:end]

    def find(self, messages: Sequence[_Message], tools: Any, text: str) -> list[tuple[int, int]]:
        """Character ranges of the assistant turns in `text`, in order of the assistant messages."""
        if MARKS.search(text):
            raise RowError("messages", "characters from Unicode's private use plane 15", "text without such characters")
        edges = any(isinstance(c := m.get("content"), str) and c != c.strip() for m in messages)
        for how in _MARKINGS:
            if how.outside and not edges:
                continue
            marked = [_marked(m, i, how) for i, m in enumerate(messages)]
            try:
                rendered = self._render(marked, tools, False)
            except RowError:
                continue
            if MARKS.sub("", rendered) == text:
                return self._turns(messages, rendered)
        raise RowError(
            "messages",
            "the assistant's turns cannot be located: the chat template transforms message contents",
            MARKED_TEMPLATE,
        )

    def _turns(self, messages: Sequence[_Message], marked: str) -> list[tuple[int, int]]:
        where: dict[str, int] = {}
        marks = [m.start() for m in MARKS.finditer(marked)]
        for place in marks:
            if (ord(marked[place]) - BASE) % 2 or marked[place] not in where:  # the first start mark, the last end mark
                where[marked[place]] = place
        turns, position = [], 0
        for i, message in enumerate(messages):
            end = where.get(_end(i))
            if message["role"] != "assistant":
                position = max(position, end + 1 if end is not None else position)
                continue
            following = min((at for mark, at in where.items() if ord(mark) - BASE > 2 * i + 1), default=len(marked))
            begin = self._begin(messages, i, marked, where, (position, following))
            if begin is None:
                fault = "the chat template omits this assistant message, or its start cannot be located"
                raise RowError(f"messages[{i}]", fault, MARKED_TEMPLATE)
            stop = self._stop(
                marked, end if end is not None else begin, end is not None, bool(message.get("tool_calls"))
            )
            names = [str(c.get("function", c).get("name")) for c in message.get("tool_calls") or ()]
            if stop > following or any(name not in marked[begin:stop] for name in names):
                fault = "the chat template omits a tool call of this assistant message, or its end cannot be located"
                raise RowError(f"messages[{i}]", fault, MARKED_TEMPLATE)
            turns.append((begin, stop))
            position = stop
        shift = _shifts(marks)
        return [(a - shift(a), b - shift(b)) for a, b in turns]

    def _begin(
        self, messages: Sequence[_Message], i: int, marked: str, where: dict[str, int], between: tuple[int, int]
    ) -> int | None:
        """Where the turn of message `i` begins, `between` the end of the message before it and the first mark of a
        later one."""
        position, following = between
        content = where.get(_start(i))
        calls = messages[i].get("tool_calls")  # Gemma 4 writes them before the content
        if content is not None and not calls and not _has_reasoning(messages[i]):
            return self._behind_header(marked, position, content)
        if i and _end(i - 1) in where and position == where[_end(i - 1)] + 1:
            tail = self._tail(messages[i - 1]["role"])
            # the mark may stand before white space that the template keeps
            for space in ("", _trailing(messages[i - 1])):
                behind = -1 if tail is None else _behind_opening(marked, space + tail, position)
                if behind >= 0:
                    return _behind_empty_block(messages[i], marked, behind)
        if core := self.header.partition(REASONS)[0]:
            header_at = marked.find(core, position, where.get(_end(i), following))
            behind = _behind_opening(marked, self.header, header_at) if header_at >= 0 else -1
            return _behind_empty_block(messages[i], marked, behind) if behind >= 0 else content
        return content

    def _behind_header(self, marked: str, position: int, content: int) -> int:
        """Where an answer begins whose content begins at `content`: special tokens between it and the generation
        prompt, such as gpt-oss's `<|channel|>final<|message|>`, are the model's; an empty block of reasoning is not."""
        header_at = marked.rfind(self.header, position, content) if self.header else -1
        if header_at < 0:
            return content
        begin = header_at + len(self.header)
        written = marked[begin:content]
        own = any(t in written for t in self._specials) and not REASONING_WORDS.search(written)
        return begin if own else content

    def _stop(self, marked: str, begin: int, has_content: bool, calls: bool) -> int:
        """Where the turn ends whose content ends at `begin`, with its tool calls."""
        matches = [(position, position + len(t)) for t in self.ends if (position := marked.find(t, begin)) >= 0]
        if matches:
            return max(end for position, end in matches if position == min(matches)[0])
        if has_content and not calls:
            return begin
        following = self._first_special(marked, begin)  # GLM's: the next role's
        return len(marked) if following is None else marked.index(following, begin)


def _shifts(marks: Sequence[int]) -> Callable[[int], int]:
    return lambda at: bisect_left(marks, at)
