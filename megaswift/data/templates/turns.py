"""Locates assistant turns in rendered text for chat templates without `{% generation %}`.

A turn is what the assistant wrote (content, reasoning, tool calls) and the token that ends its turn. Templates trim
contents, strip reasoning from earlier turns, move the system message and write headers, so contents cannot be searched
for, and a prefix of the conversation need not be a prefix of the text. Instead the conversation is rendered a second
time with private-use characters at the edges of the contents: where they come out, the contents are. The text without
them must be the text that was asked for, byte for byte; otherwise fewer edges are marked.

Left out: which turns carry loss (`render.py`), tokens (`encode/rows.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift.data.templates.message_forms import PROBE_ID, MessageForms
from megaswift.data.untokenized_sample import REASONING, RowError, is_data, is_parts, says_nothing

_Message = dict[str, Any]
_Render = Callable[[Sequence[_Message], Any, bool], str]

BASE = 0xF0000
"""First character of Unicode's supplementary private use area A."""
MARKS = re.compile(f"[{chr(BASE)}-{chr(BASE + 0xFFFD)}]")
STAND_IN = chr(0x10FFFD)
"""Stands for each character of a row that could be taken for a mark, while the turns of that row are located. Like
these it takes two units of UTF-16, so that places stay the same where a template escapes it."""
MARKED_TEMPLATE = "a chat template with {% generation %} around the assistant's turns (--chat_template)"
REASONS = "<think>"
EMPTY_BLOCK = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
"""The generation prompt may have brought its beginning."""
REASONING_WORDS = re.compile("think|thought", re.IGNORECASE)
"""In the special tokens of an empty block of reasoning, whatever the model."""
SHORTEST_CLOSING = 3
"""Characters of what is written behind a call's arguments, enough to be found again."""
_ASK: _Message = {"role": "user", "content": "x"}


def _start(i: int) -> str:
    return chr(BASE + 4 * i)


def _end(i: int) -> str:
    return chr(BASE + 4 * i + 1)


def _first_call(i: int) -> str:
    return chr(BASE + 4 * i + 2)


def _last_call(i: int) -> str:
    return chr(BASE + 4 * i + 3)


@dataclass(frozen=True)
class _Marking:
    """The places that a second rendering marks. More marks tell more, if the template lets them pass."""

    fronts: bool
    """The starts of users' and tools' contents too."""
    others: bool
    """Their ends."""
    starts: bool
    """The starts of the assistant's contents and reasoning, and the names of its calls."""
    outside: bool
    """Marks outside of contents' outer white space: exact, but in the way of templates that trim it."""
    printed: bool = False
    """A content that is neither text nor parts is marked as the text that Jinja prints, else within its texts
    (`tojson`)."""


_MARKINGS = tuple(
    _Marking(*m)
    for m in (
        (True, True, True, True),
        (True, True, True, False),
        (False, True, True, True),
        (False, True, True, False),
        (False, False, True, True),
        (False, False, True, False),
        (True, True, False, True),
        (True, True, False, False),
        (False, False, False, False),
    )
)


def _mark_text(text: str, i: int, how: _Marking, answers: bool) -> str:
    """`text` with marks at its edges, and in an answer a start mark after its reasoning too."""
    core = text if how.outside else text.strip()
    if not core.strip():
        return text
    offset = text.index(core)
    lead = text[:offset]
    trail = text[offset + len(core) :]
    if not answers or not how.starts:
        return lead + (_start(i) if how.fronts and not answers else "") + core + _end(i) + trail
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
    changed = dict(message)
    if answers and how.starts:
        for key in REASONING:
            if isinstance(text := message.get(key), str) and (core := text.strip()):
                changed[key] = text.replace(core, _start(i) + core, 1)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = _marked_calls(calls, i)
    if isinstance(content, str):
        changed["content"] = _mark_text(content, i, how, answers)
    elif is_parts(content) and any(map(_has_text, content)):
        marked = [p | {"text": _mark_text(p["text"], i, how, answers)} if _has_text(p) else p for p in content]
        changed["content"] = marked
    elif is_data(content) and how.printed:
        changed["content"] = _mark_text(str(content), i, how, answers)
    elif content is not None:
        marks_start = how.starts if answers else how.fronts
        front = _start(i) if marks_start else ""
        changed["content"] = _mark_data(_mark_data(content, _end(i), last=True), front)
    return changed


def _has_text(part: _Message) -> bool:
    return isinstance(part.get("text"), str)


def _mark_data(value: Any, mark: str, last: bool = False) -> Any:
    """JSON with a mark before its first text, or behind its `last` one; as it is where it has no text."""
    if isinstance(value, str):
        if not value.strip():
            return value
        return value + mark if last else mark + value
    if not isinstance(value, list | dict):
        return value
    copy = value.copy()
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in reversed(keys) if last else keys:
        if key == "type":  # templates look at the types of parts
            continue
        copy[key] = _mark_data(value[key], mark, last)
        if copy[key] != value[key]:
            break
    return copy


def _with_marks_around_printed(rendered: str, message: _Message, marked: _Message, i: int, how: _Marking) -> str:
    """A text in which marks stand around a list or an object that the template prints: Python escapes those within."""
    content = message.get("content")
    if content is None or isinstance(content, str) or marked["content"] == content:
        return rendered
    around = _mark_text(str(content), i, how, message["role"] == "assistant")
    return rendered.replace(str(marked["content"]), around)


def _without_marks(value: Any) -> Any:
    """Text, or JSON that holds texts, with stand-ins for characters that are marks here; no place in it changes."""
    if isinstance(value, str):
        return MARKS.sub(STAND_IN, value)
    if isinstance(value, Mapping):
        return {_without_marks(key): _without_marks(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_marks(item) for item in value]
    return value


def _marked_calls(calls: Sequence[_Message], i: int) -> list[_Message]:
    """Calls with marks before the first one's name and behind the last one's."""
    marked = [dict(call) for call in calls]
    for k, mark in ((0, _first_call(i)), (len(calls) - 1, _last_call(i))):
        call = marked[k]
        function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else call
        name = function.get("name")
        if isinstance(name, str):
            function["name"] = mark + name if mark == _first_call(i) else name + mark
        if function is not call:
            call["function"] = function
    return marked


def _has_reasoning(message: _Message) -> bool:
    content = message.get("content")
    return any(message.get(k) for k in REASONING) or (isinstance(content, str) and "</think>" in content)


def _trailing(message: _Message) -> str:
    content = message.get("content")
    return content[len(content.rstrip()) :] if isinstance(content, str) else ""


@dataclass(frozen=True)
class _Places:
    """The positions of a conversation's marks in the rendered text."""

    text: str
    """With the marks."""
    first: dict[str, int]
    """The first place of each mark."""
    last: dict[str, int]

    @classmethod
    def of(cls, text: str) -> _Places:
        found = [(m.group(), m.start()) for m in MARKS.finditer(text)]
        return cls(text, dict(reversed(found)), dict(found))

    def content_end(self, i: int) -> int | None:
        """Behind the content of message `i`."""
        place = self.last.get(_end(i))
        return None if place is None else place + 1

    def begin(self, i: int) -> int | None:
        """The first character of what message `i` says or calls."""
        return min((self.first[m] for m in (_start(i), _first_call(i)) if m in self.first), default=None)

    def end(self, i: int) -> int | None:
        """Behind the last mark of message `i`. A call's name may come out again with its result."""
        own = [self.last[_end(i)]] if _end(i) in self.last else []
        own += [self.first[m] for m in (_first_call(i), _last_call(i)) if m in self.first]
        return max(own) + 1 if own else None

    def is_content_apart(self, i: int) -> bool:
        """Whether other messages stand between the calls of message `i` and its content behind them."""
        own = _first_call(i) in self.first and _start(i) in self.first and _end(i) in self.last
        return own and self.first[_first_call(i)] < self.following(i) < self.last[_start(i)]

    def without_content(self, i: int) -> _Places:
        """The same without the marks of the content of message `i`; that of its reasoning stays."""
        gone = (_start(i), _end(i))
        first, last = (
            {mark: at for mark, at in places.items() if mark not in gone} for places in (self.first, self.last)
        )
        if self.first[_start(i)] < self.following(i):
            first[_start(i)] = self.first[_start(i)]
        return replace(self, first=first, last=last)

    def following(self, i: int) -> int:
        """The first mark of a message after `i`."""
        return min((at for mark, at in self.first.items() if ord(mark) - BASE > 4 * i + 3), default=len(self.text))

    def unmarked(self, at: int) -> int:
        """The same place in the text without marks."""
        return at - len(MARKS.findall(self.text, 0, at))


class AssistantTurnFinder:
    """Finds assistant turns for one template, in conversations with or without tools; what the template writes around
    turns is learnt once."""

    def __init__(self, render: _Render, end_tokens: Sequence[str], tools: Any = None) -> None:
        """`tools`: those of the short conversations that are learnt from; None for conversations without."""
        self._render = render
        self._tools = tools
        self._specials = sorted((t for t in end_tokens if t), key=len, reverse=True)
        self._tails: dict[str, str] = {}
        self._forms = MessageForms(self._try)
        self.header, self.ends = self._learn_header_and_ends()
        self._openings = self._learn_openings()
        self._closing = self._learn_closing()

    def _try(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False) -> str | None:
        try:
            return self._render([dict(m) for m in messages], tools, prompt)
        except RowError:
            return None

    def _probe(self, *messages: _Message, prompt: bool = False) -> str:
        """The text of a short conversation; empty where the template refuses it."""
        return self._try(messages, self._tools, prompt) or ""

    def _calling(self, mark: str = "") -> _Message:
        call = {"type": "function", "id": PROBE_ID, "function": {"name": "f", "arguments": {"a": "b" + mark}}}
        return next(self._forms.forms([{"role": "assistant", "content": "", "tool_calls": [call]}], self._tools))[0]

    def _learn_header_and_ends(self) -> tuple[str, tuple[str, ...]]:
        """(what the template writes where an answer is to begin: its generation prompt, or nothing; the texts that end
        an assistant's turn, each one or more tokens: in the last place, after a tool call, and in the middle)."""
        plain = self._probe(_ASK)
        prompted = self._probe(_ASK, prompt=True)
        header = prompted[self._common(plain, prompted) :] if plain and prompted else ""
        answer = {"role": "assistant", "content": _start(0) + "y" + _end(0)}
        last = self._probe(_ASK, answer)
        after = last.rpartition(_end(0))[2]
        ending = self._first_special(after)
        if ending is None:
            return header, ()
        place = after.index(ending)
        middle = self._probe(_ASK, answer, _ASK).rpartition(_end(0))[2]
        if after[:place].strip() and not middle.startswith(after[:place]):  # words behind the conversation, not an end
            return header, ()
        rest = after[place + len(ending) :]
        if rest.strip() and last.partition(_start(0))[0].endswith(rest):  # the next answer's header is always there
            header = rest
            run = ending
        else:
            run = self._specials_at(after, place)
        ends = [ending, run]
        other = self._first_special(middle)
        if other is not None and middle.index(other) == place and middle[:place] == after[:place]:
            ends.append(other)
        calling = self._probe(_ASK, self._calling()).removesuffix(header).rstrip()
        ends += [t for t in self._specials if calling.endswith(t)][:1]
        return header, tuple(dict.fromkeys(ends))

    def _common(self, text: str, other: str) -> int:
        """The length of what two texts begin with alike, up to the beginning of a special token."""
        length = len(os.path.commonprefix([text, other]))
        for token in self._specials:
            for at in range(max(0, length - len(token) + 1), length):
                if other.startswith(token, at) or text.startswith(token, at):
                    return self._common(text[:at], other[:at])
        return length

    def _learn_openings(self) -> tuple[str, ...]:
        """Return the texts that may begin an answer: the generation prompt, and the part of it before answers of every
        kind. The rest opens a block of reasoning (Qwen3.5) or is an empty one (Gemma 4)."""
        if not self.header.strip():
            return ()
        core = self.header.partition(REASONS)[0]
        thought = {"reasoning_content": _start(0) + "z", "content": _start(0) + "y"}
        answers: list[list[_Message]] = [
            [{"role": "assistant", **thought}],
            [{"role": "assistant", "content": _start(0) + "y"}, _ASK],
        ]
        for messages in answers:
            text = self._probe({**_ASK, "content": "x" + _end(0)}, *messages)
            between = text.rpartition(_end(0))[2].partition(_start(0))[0]
            at = between.find(core[:1]) if core else -1
            shared = (
                [core[: self._common(core, between[k:])] for k in range(max(at, 0), len(between))] if at >= 0 else []
            )
            core = max(shared, key=len, default="") if _start(0) in text else core
        return tuple(dict.fromkeys(opening for opening in (self.header, core) if opening.strip()))

    def _learn_closing(self) -> str:
        """Return the text that follows the last argument of every call."""
        calling = self._calling(_end(0))
        results: tuple[list[_Message], ...] = (
            [],
            [{"role": "tool", "content": "x", "name": "f", "tool_call_id": PROBE_ID}],
        )
        behind = [self._probe(_ASK, calling, *more).rpartition(_end(0))[2] for more in results]
        return behind[0][: self._common(*behind)].rstrip()

    def _tail(self, role: str) -> tuple[str, ...]:
        """Return the texts that may stand between a `role` message's content and the answer after it."""
        if role not in self._tails:
            probe: list[_Message] = [{"role": role, "content": "x" + _end(0)}]
            if role not in ("user", "system", "developer"):
                probe = [_ASK, self._calling(), {**probe[0], "name": "f", "tool_call_id": PROBE_ID}]
            text = self._probe(*probe, prompt=True)
            self._tails[role] = text.rpartition(_end(0))[2] if _end(0) in text else "\0"
        tail = self._tails[role]
        if tail == "\0":
            return ()
        around = tail.removesuffix(self.header)
        others = [around + opening for opening in self._openings if tail != around]
        return tuple(dict.fromkeys([tail, tail.partition(REASONS)[0], *others]))

    def _first_special(self, text: str, begin: int = 0) -> str | None:
        candidates = [(text.find(t, begin), -len(t), t) for t in self._specials]
        return min((f for f in candidates if f[0] >= 0), default=(0, 0, None))[2]

    def _specials_at(self, text: str, begin: int) -> str:
        """The special tokens that stand at `begin`, one right after the other, as Cohere's models end a turn."""
        end = begin
        while token := next((t for t in self._specials if text.startswith(t, end)), ""):
            end += len(token)
        return text[begin:end]

    def find(self, messages: Sequence[_Message], tools: Any, text: str) -> list[list[tuple[int, int]]]:
        """Character ranges of each assistant turn in `text`, in order of the assistant messages. A turn has more than
        one where the template writes other messages within it (Gemma 4: a result between a call and its content), and
        none where the template leaves out all that the message says and calls."""
        if MARKS.search(text):
            messages = _without_marks(messages)
            tools = _without_marks(tools)
            # Rendered again, as a template may have escaped some of them (`tojson`)
            rendered = self._render(messages, tools, False)
            text = rendered if len(rendered) == len(text) else text
        edges = any(isinstance(c := m.get("content"), str) and c != c.strip() for m in messages)
        ways = list(_MARKINGS)
        if any(is_data(m.get("content")) for m in messages):
            ways = [replace(how, printed=printed) for how in ways for printed in (True, False)]
        for how in ways:
            if how.outside and not edges:
                continue
            marked = [_marked(m, i, how) for i, m in enumerate(messages)]
            try:
                rendered = self._render(marked, tools, False)
            except RowError:
                continue
            for i, (message, other) in enumerate(zip(messages, marked, strict=True)):
                rendered = _with_marks_around_printed(rendered, message, other, i, how)
            if MARKS.sub("", rendered) == text:
                return self._turns(messages, tools, _Places.of(rendered))
        raise RowError(
            "messages",
            "the assistant's turns cannot be located: the chat template transforms message contents",
            MARKED_TEMPLATE,
        )

    def _turns(self, messages: Sequence[_Message], tools: Any, places: _Places) -> list[list[tuple[int, int]]]:
        turns: list[list[tuple[int, int]]] = []
        position = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                position = max(position, places.content_end(i) or position)
                continue
            own = places.without_content(i) if places.is_content_apart(i) else places
            found = self._turn(messages, i, own, position, tools)
            calls = message.get("tool_calls") or ()
            if found is not None and calls and omits_all_calls(calls, MARKS.sub("", places.text[slice(*found)])):
                said = {key: value for key, value in message.items() if key != "tool_calls"}
                without = [*messages[:i], said, *messages[i + 1 :]]
                found = None if says_nothing(said) else self._turn(without, i, own, position, tools)
            if found is None:
                turns.append([])
                continue
            begin, stop = found
            turn = [found]
            if own is not places:
                turn.append(self._content(i, places))
            turns.append([(places.unmarked(a), places.unmarked(b)) for a, b in turn])
            position = stop
        return turns

    def _turn(
        self, messages: Sequence[_Message], i: int, places: _Places, position: int, tools: Any
    ) -> tuple[int, int] | None:
        """Return where the turn of message `i` begins and ends after `position`; None if the template omits it."""
        begin = self._begin(messages, i, places, position, tools)
        return None if begin is None else (begin, self._stop(messages, i, places, begin, tools))

    def _content(self, i: int, places: _Places) -> tuple[int, int]:
        """Where the content of message `i` stands that the template writes apart from its calls."""
        begin = places.text.index(_start(i), places.following(i))
        end = places.content_end(i)
        assert end is not None
        bound = min((at for at in places.first.values() if at >= end), default=len(places.text))
        stop = self._behind_end(places.text, end)
        return begin, stop if stop is not None and stop <= bound else end

    def _begin(self, messages: Sequence[_Message], i: int, places: _Places, position: int, tools: Any) -> int | None:
        """Where the turn of message `i` begins, behind `position`, the end of the message before it."""
        message = messages[i]
        first = places.begin(i)
        calls = message.get("tool_calls")  # Gemma 4 writes them before the content
        if first is not None and not calls and not _has_reasoning(message):
            return self._behind_header(places.text, position, first)
        content = message.get("content")
        if places.end(i) is None and not calls and isinstance(content, str) and content.strip():
            return None  # no mark of it came out
        bound = first
        if bound is None:
            bound = min(places.content_end(i) or len(places.text), places.following(i))
        text = MARKS.sub("", places.text)
        begin = self._behind_opening(
            messages, i, text, places, (places.unmarked(position), places.unmarked(bound)), tools
        )
        if begin is None:
            if first is not None or not calls:
                return first
            return position if position else None
        block = None if _has_reasoning(message) else EMPTY_BLOCK.match(text, begin)
        begin = block.end() if block and block.end() <= places.unmarked(bound) else begin
        return _marked_place(places.text, begin)

    def _behind_opening(
        self, messages: Sequence[_Message], i: int, text: str, places: _Places, between: tuple[int, int], tools: Any
    ) -> int | None:
        """The place in the text without marks behind what the template writes before the answer of message `i`, from
        the end of the message before it to the first that is the answer's own."""
        position, bound = between
        if i and position == places.unmarked(places.content_end(i - 1) or 0):
            # the mark may stand before white space that the template keeps
            for tail in self._tail(messages[i - 1]["role"]):
                for written in (tail, _trailing(messages[i - 1]) + tail):
                    if written and text.startswith(written, position):
                        return position + len(written)
        for opening in self._openings:  # a content may bring along what the generation prompt ends with: <think>
            # the last one before what the message says: an omitted message before it may have left its own
            find = text.find if places.begin(i) is None else text.rfind
            at = find(opening, position, bound + len(opening))
            if 0 <= at <= bound:
                return at + len(opening)
        # up to where the text is the prompt of the messages before, if the template writes these as it does here
        for prompt in (self._try(messages[:i], tools, prompt) for prompt in (True, False)):
            length = self._common(prompt, text) if prompt else 0
            if prompt and position <= length <= bound and length == len(prompt.rstrip()):
                return length
        return None

    def _behind_header(self, marked: str, position: int, content: int) -> int:
        """Where an answer begins whose content begins at `content`: special tokens between it and the generation
        prompt, such as gpt-oss's `<|channel|>final<|message|>`, are the model's; an empty block of reasoning is not."""
        for opening in self._openings:
            header_at = marked.rfind(opening, position, content)
            if header_at >= 0:
                begin = header_at + len(opening)
                written = marked[begin:content]
                own = any(t in written for t in self._specials) and not REASONING_WORDS.search(written)
                return begin if own else content
        return content

    def _stop(self, messages: Sequence[_Message], i: int, places: _Places, begin: int, tools: Any) -> int:
        """Where the turn of message `i` ends, which begins at `begin`, with its tool calls."""
        marked = places.text
        following = places.following(i)
        calls = messages[i].get("tool_calls")
        last = max(places.end(i) or begin, begin)
        stop = self._behind_end(marked, last)
        if stop is not None and stop <= following:
            return stop
        if not calls and (places.end(i) is not None or not _has_reasoning(messages[i])):
            return last
        # a turn that no token ends: up to where the conversation without what follows ends, or to the next role's token
        whole = self._try(messages[: i + 1], tools)
        text = MARKS.sub("", marked)
        if whole and text.startswith(whole := whole.removesuffix(self.header).rstrip()):
            stop = _marked_place(marked, len(whole))
            if last <= stop <= following and (len(whole) < len(text) or not calls):
                return stop
        if not calls:
            return last
        for closing in (self._closing[k:] for k in range(len(self._closing) - SHORTEST_CLOSING + 1)):
            if (at := marked.rfind(closing, last, following)) >= 0:
                return at + len(closing)
        token = self._first_special(marked, last)
        return min(len(marked) if token is None else marked.index(token, last), following)

    def _behind_end(self, marked: str, at: int) -> int | None:
        """Behind the first text from `at` on that ends a turn; None without one."""
        matches = [(place, place + len(t)) for t in self.ends if (place := marked.find(t, at)) >= 0]
        return max(end for place, end in matches if place == min(matches)[0]) if matches else None


def omits_call(call: _Message, turn: str) -> bool:
    """Whether a turn lacks this call: its name, and what Kimi's models write in place of it, its id."""
    function = call.get("function") or call
    return not any(isinstance(word, str) and word and word in turn for word in (function.get("name"), call.get("id")))


def omits_all_calls(calls: Sequence[_Message], turn: str) -> bool:
    """Whether a turn lacks all of these calls."""
    return all(omits_call(call, turn) for call in calls)


def _marked_place(marked: str, at: int) -> int:
    """The place in a text with marks of character `at` of the text without."""
    place = at
    for mark in MARKS.finditer(marked):
        if mark.start() >= place:
            break
        place += 1
    return place
