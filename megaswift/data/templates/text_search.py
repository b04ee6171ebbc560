"""Locates assistant turns in a rendered conversation by searching for the messages' own texts, in order.

Owns the second way to find the loss mask, for the certificate of `megaswift data show`: it shares no code with
`turns.py` and renders nothing a second time. What a template writes before an answer
and after it is learnt from short conversations, once a template. A text that the template changes is not found and is
reported; nothing is guessed.

Left out: tokens and what follows from the places (`show/loss_mask.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Render = Callable[[Sequence[Mapping[str, Any]], Any, bool], str | None]
"""Text of messages, tools, and whether a generation prompt follows; None where the template refuses them."""
ASKED = "megaswiftquestion"
ANSWERED = "megaswiftanswer"
_SECOND = "megaswiftsecond"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
OPENING = "<think>"
CLOSING = "</think>"
MOST_SPACE = 64
"""Characters of white space that may follow the end of a turn."""
MEDIUM = re.compile(r"<image>|<video>|<img>.+?</img>", re.DOTALL)
"""Where an image or a video stands in a text of a row."""
_USER = {"role": "user", "content": ASKED}
_ANSWER = {"role": "assistant", "content": ANSWERED}
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULTS = ("tool", "function", "ipython", "observation")
_RESULT = {"role": "tool", "content": ASKED, "name": "f", "tool_call_id": "abcdefghi"}

MESSAGE_MISSING = "message_missing"
SYSTEM_MISSING = "system_missing"
ANSWER_CHANGED = "answer_changed"
REASONING_MISSING = "reasoning_missing"
CALL_MISSING = "call_missing"
TOOL_MISSING = "tool_missing"
NO_END = "no_end"
EARLIER_REASONING = "earlier_reasoning"


@dataclass(frozen=True)
class AnswerPlace:
    """Where one assistant message stands, as character positions."""

    message: int
    begin: int
    """Behind what the template writes before an answer: nothing before it may carry loss."""
    block: int
    """Behind an empty block of reasoning that the template itself writes there; else `begin`."""
    own: int
    """The same with the white space that follows."""
    header: int
    """Where the special tokens begin that the model writes before the message's own texts (gpt-oss's channel); else
    `first`."""
    first: int
    """The first character of the message's own texts."""
    last: int
    """Behind the last one."""
    stop: int
    """Where the token stands that ends the turn; behind the texts where there is none."""
    end: int
    """Behind the token that ends the turn, or behind the message's own texts where there is none."""
    limit: int
    """The same with what else the template writes behind an answer, and white space."""


@dataclass
class SearchResult:
    """The places of the assistant messages that were found, and what was not found."""

    places: list[AnswerPlace] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(what: one of the names above, where)."""


class AnswerSearch:
    """Searches the texts of one template."""

    def __init__(self, render: Render, special_tokens: Sequence[str], eos_token: str, tools: Any = None) -> None:
        """`tools`: those of the short conversations that are learnt from; None for conversations without."""
        self._render = render
        self._tools = tools
        self._specials = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._openers: dict[str, str] = {}
        self._frames: dict[str, str] = {}
        self._header = self._learn_header()
        self._ends, self._closing = self._learn_ends(eos_token)
        self._content_behind_results = self._learn_place_of_content()

    def _between(self, before: Sequence[Mapping[str, Any]]) -> str:
        """What stands between a message that says ASKED and the answer to it."""
        text = self._render([*before, _ANSWER], self._tools, False) or ""
        asked = text.rfind(ASKED)
        answered = text.rfind(ANSWERED)
        return text[asked + len(ASKED) : answered] if 0 <= asked < answered else ""

    def _learn_header(self) -> str:
        """The generation prompt, as far as it also stands before an answer that is there."""
        plain = self._render([_USER], self._tools, False)
        prompted = self._render([_USER], self._tools, True)
        if plain is None or prompted is None or not prompted.startswith(plain):
            return ""
        header = prompted[len(plain) :].partition(OPENING)[0]
        between = self._between([_USER])
        while header and header not in between:
            header = header[:-1]
        return header if header.strip() else ""

    def _learn_place_of_content(self) -> bool:
        """Whether the content of a message with calls stands behind the results of these, as in Gemma 4's template."""
        messages: list[Mapping[str, Any]] = [_USER, {**_CALLING, "content": ANSWERED}, {**_RESULT, "content": _SECOND}]
        text = self._render(messages, self._tools, False) or ""
        return 0 <= text.find(_SECOND) < text.find(ANSWERED)

    def _opener(self, role: str) -> str:
        """What stands before an answer to a message of `role` in a template without generation prompt."""
        if role not in self._openers:
            messages: dict[str, list[Mapping[str, Any]]] = {"user": [_USER], "tool": [_USER, _CALLING, _RESULT]}
            before = messages.get(role)
            self._openers[role] = self._between(before).partition(OPENING)[0].strip() if before else ""
        return self._openers[role]

    def _behind_frame(self, text: str, role: str, at: int, found: int) -> int:
        """Where the contents of `role` may begin, if what stands at `found` is part of what the template writes before
        them: a tool's result INST in [INST]; else `found`."""
        if role not in self._frames:
            tool = role == "tool"
            before: Sequence[Mapping[str, Any]] = (_USER, _CALLING, _RESULT) if tool else (_USER, _ANSWER)
            written = (
                self._render([*before, {**before[-1 if tool else 0], "content": _SECOND}], self._tools, False) or ""
            )
            first = written[: written.rfind(ASKED) if tool else written.find(ASKED)]
            self._frames[role] = os.path.commonprefix([first[::-1], written.partition(_SECOND)[0][::-1]])[::-1]
        frame = self._frames[role]
        begin = text.find(frame, at) if frame.strip() else -1
        return begin + len(frame) if 0 <= begin < found + 1 <= begin + len(frame) else found

    def _learn_ends(self, eos_token: str) -> tuple[tuple[str, ...], str]:
        """(the texts that end a turn, all that the template writes behind the last answer for its end). A text is one
        or more special tokens in a row: behind the last answer, behind an earlier one, and the tokenizer's."""
        last, middle = (self._behind_answer(more) for more in ([], [{**_USER, "content": "x"}]))
        at, token = self._first_special(last, 0)
        run = self._own_tokens(self._run(last, at), eos_token)
        place, other = self._first_special(middle, 0)
        called = (self._render([_USER, _CALLING], self._tools, False) or "").rstrip()
        calling = next((t for t in self._specials if called.endswith(t)), "")
        calling = calling if calling == token or calling not in self._begin_tokens() else ""
        ends = [eos_token, run, token, other if token and middle[:place] == last[:at] else "", calling]
        closing = last[at:].rstrip()
        alone = not self._without_specials(closing[len(run) :]).strip()
        others = any(t in closing[len(run) :] for t in self._begin_tokens())
        return tuple(dict.fromkeys(filter(None, ends))), closing if alone and not others else run

    def _run(self, text: str, at: int) -> list[str]:
        """The special tokens that stand at `at`, one right after the other."""
        tokens: list[str] = []
        while more := next((t for t in self._specials if text.startswith(t, at)), ""):
            tokens.append(more)
            at += len(more)
        return tokens

    def _own_tokens(self, run: Sequence[str], eos_token: str) -> str:
        """Those of the tokens behind an answer that are its end: up to the tokenizer's end token, or up to the first
        with which messages begin. Templates may write the next message's header in any case."""
        if eos_token in run:
            return "".join(run[: run.index(eos_token) + 1])
        begins = self._begin_tokens()
        stop = next((k for k, token in enumerate(run) if k and token in begins), len(run))
        return "".join(run[:stop])

    def _begin_tokens(self) -> set[str]:
        """The special tokens that stand before the first message's text."""
        before = (self._render([_USER], self._tools, False) or "").partition(ASKED)[0]
        return {token for token in self._specials if token in before}

    def _without_specials(self, text: str) -> str:
        for token in self._specials:
            text = text.replace(token, "")
        return text

    def _behind_answer(self, more: Sequence[Mapping[str, Any]]) -> str:
        """What follows an answer before other messages."""
        text = self._render([_USER, _ANSWER, *more], self._tools, False) or ""
        return text.rpartition(ANSWERED)[2] if ANSWERED in text else ""

    def _first_special(self, text: str, begin: int) -> tuple[int, str]:
        found = [(at, -len(token), token) for token in self._specials if (at := text.find(token, begin)) >= 0]
        at, _, token = min(found, default=(len(text), 0, ""))
        return at, token

    def search(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> SearchResult:
        """The places of all assistant messages of a rendered conversation."""
        result = SearchResult()
        at = 0
        before = ""
        waiting: tuple[int, Mapping[str, Any]] | None = None
        last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            role = message["role"]
            if waiting is not None and role not in _RESULTS:
                at = self._within_turn(text, at, *waiting, last_question, result)
                at = self._before_answer(text, at, message, result) if role == "assistant" else at
                waiting = None
            if role == "assistant":
                if self._content_behind_results and _has_result(messages, i) and content_pieces(message):
                    waiting = i, {"role": role, "content": message["content"]}
                    message = {**message, "content": ""}
                opener = self._header or self._opener(before)
                found = text.find(opener, at)
                own = self._own_begin(text, at, message)
                if before in _RESULTS and own >= 0 and not at <= found < own:  # Gemma 4: within the turn of the call
                    at = self._within_turn(text, at, i, message, last_question, result)
                elif found < 0:
                    result.missing.append((ANSWER_CHANGED, f"messages[{i}]"))
                else:
                    place = self._answer(text, found + len(opener), i, message, i > last_question, result)
                    at = place.limit if place is not None else at
            elif role in ("system", "developer"):
                whole = all(_find(text, piece, 0)[0] >= 0 for piece in content_pieces(message))
                result.missing += [] if whole else [(SYSTEM_MISSING, f"messages[{i}]")]
            elif _is_data(message.get("content")):
                ends = [_find(text, leaf, at)[1] for leaf in _leaves(message["content"]) if isinstance(leaf, str)]
                result.missing += [(MESSAGE_MISSING, f"messages[{i}] ({role})")] if -1 in ends else []
                at = max([at, *ends])
            else:
                for piece in content_pieces(message):
                    found, end = _find(text, piece, at)
                    if found >= 0 and (behind := self._behind_frame(text, role, at, found)) > found:
                        found, end = _find(text, piece, behind)
                    if found < 0:
                        result.missing.append((MESSAGE_MISSING, f"messages[{i}] ({role})"))
                        break
                    at = end
            before = role
        if waiting is not None:
            self._within_turn(text, at, *waiting, last_question, result)
        result.missing += missing_tools(text, tools)
        return result

    def _within_turn(
        self, text: str, at: int, i: int, message: Mapping[str, Any], last_question: int, result: SearchResult
    ) -> int:
        """Searches what stands behind a result within the turn of the call; returns where the search goes on."""
        own = self._own_begin(text, at, message)
        if own < 0:
            result.missing.append((ANSWER_CHANGED, f"messages[{i}]"))
            return at
        place = self._answer(text, own, i, message, i > last_question, result)
        return place.limit if place is not None else at

    def _before_answer(self, text: str, at: int, message: Mapping[str, Any], result: SearchResult) -> int:
        """Where the search goes on, up to `at`, if the answer `message` follows within the turn of the last place."""
        if not result.places:
            return at
        place = result.places[-1]
        other = self._own_begin(text, place.last, message)
        if not place.last <= other < place.stop or self._header in text[place.last : other]:
            return at
        result.places[-1] = replace(place, stop=place.last, end=place.last, limit=other)
        return other

    def _own_begin(self, text: str, at: int, message: Mapping[str, Any]) -> int:
        """Where the first text or the first call's name of an answer stands from `at` on; -1 where neither does."""
        reasoning, pieces = split_reasoning(message)
        calls = [str((call.get("function") or call).get("name")) for call in message.get("tool_calls") or ()]
        found = [text.find(word, at) for word in filter(None, (reasoning, *pieces[:1], *calls[:1]))]
        return min((place for place in found if place >= 0), default=-1)

    def _end(self, text: str, at: int) -> tuple[int, int]:
        """The first token from `at` on that ends a turn, before another answer begins; (-1, -1) without one."""
        found = [(place, place + len(token)) for token in self._ends if (place := text.find(token, at)) >= 0]
        begin, end = min(found, key=lambda one: (one[0], -one[1]), default=(-1, -1))
        other = text.find(self._header, at, begin) if self._header and begin >= 0 else -1
        return (-1, -1) if other >= 0 else (begin, end)

    def _bound_of_parts(self, text: str, at: int, bound: int) -> int:
        """Where an answer ends whose reasoning, up to `at`, is a turn of its own, as gpt-oss has it."""
        begin, end = self._end(text, at)
        if begin < 0 or not self._header or not text.startswith(self._header, end):
            return bound
        following = self._end(text, end + len(self._header))[0]
        return following if following >= 0 else bound

    def _answer(
        self, text: str, begin: int, i: int, message: Mapping[str, Any], final: bool, result: SearchResult
    ) -> AnswerPlace | None:
        reasoning, pieces = split_reasoning(message)
        at = begin
        first = -1
        if not reasoning and text[begin : begin + MOST_SPACE].lstrip().startswith(OPENING):
            empty = text.find(CLOSING, begin)  # the template's own block
            at = empty + len(CLOSING) if empty >= 0 else at
        block = at
        own = _behind_space(text, at) if at > begin else at
        bound = self._end(text, at)[0]
        bound = self._first_special(text, at)[0] if bound < 0 else bound
        if reasoning:
            first = text.find(reasoning, at)
            if 0 <= first <= bound:
                at = first + len(reasoning)
                bound = self._bound_of_parts(text, at, bound)
            else:
                result.missing.append((REASONING_MISSING if final else EARLIER_REASONING, f"messages[{i}]"))
                first = -1
        for k, piece in enumerate(pieces):
            found = _closing(text, piece, at, bound) if k == len(pieces) - 1 else text.find(piece, at)
            if not 0 <= found <= max(bound, at):
                result.missing.append((ANSWER_CHANGED, f"messages[{i}]"))
                return None
            at = found + len(piece)
            first = found if first < 0 else first
        stop, end = self._end(text, at)
        turn = text[begin : stop if stop >= 0 else len(text)]
        calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
        result.missing += [(CALL_MISSING, f"messages[{i}].tool_calls {part}") for part in _missing_calls(turn, calls)]
        names = [begin + named for call in calls if (named := turn.find(str(call.get("name")))) >= 0]
        first = min([first, *names] if first >= 0 else names, default=-1)
        if stop < 0:
            result.missing.append((NO_END, f"messages[{i}]"))
            stop = end = self._first_special(text, at)[0] if calls else at
        last = at if pieces and not calls else stop
        end_of_all = stop + len(self._closing)
        behind = max(end, end_of_all) if self._closing and text.startswith(self._closing, stop) else end
        own = max(begin, min(own, first - _leading_space(message))) if pieces else own
        limit = _behind_space(text, behind)
        first = last if first < 0 else first
        header = first if calls else self._own_header(text, begin, first)
        place = AnswerPlace(i, begin, block, own, header, first, last, stop, end, limit)
        ids = [call["id"] for call in message.get("tool_calls") or () if call.get("id") and str(call["id"]) in turn]
        if pieces or reasoning or names or ids or not calls:  # an empty turn in place of a call carries no loss
            result.places.append(place)
        return place

    def _own_header(self, text: str, begin: int, first: int) -> int:
        """Where an answer begins with special tokens of its own behind the generation prompt at `begin`."""
        written = text[begin:first]
        reasoning = any(word in written.lower() for word in ("think", "thought"))
        own = bool(self._header) and not reasoning and self._first_special(written, 0)[1]
        return begin if own else first


def _has_result(messages: Sequence[Mapping[str, Any]], i: int) -> bool:
    """Whether message `i` has calls whose results follow."""
    return bool(messages[i].get("tool_calls")) and any(m["role"] in _RESULTS for m in messages[i + 1 : i + 2])


def _closing(text: str, piece: str, at: int, bound: int) -> int:
    """Where the last text of an answer stands: right before the end of its turn where it does, else the first place
    from `at` on. An answer of one letter may also stand in what the template writes before it."""
    place = at + len(text[at:bound].rstrip()) - len(piece)
    return place if place >= at and text.startswith(piece, place) else text.find(piece, at)


def _behind_space(text: str, at: int) -> int:
    space = text[at : at + MOST_SPACE]
    return at + len(space) - len(space.lstrip())


def _leading_space(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) - len(content.lstrip()) if isinstance(content, str) else 0


def _is_data(content: Any) -> bool:
    """Whether a content is neither text nor a list of parts: JSON that a tool returned."""
    if isinstance(content, list):
        return not all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    return content is not None and not isinstance(content, str)


def content_pieces(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message, without outer white space, cut where images and videos stand."""
    content = message.get("content")
    if _is_data(content):
        return [str(leaf).strip() for leaf in _leaves(content) if str(leaf).strip()]
    if isinstance(content, list):
        content = "<image>".join(str(part.get("text") or "") for part in content)
    return [piece.strip() for piece in MEDIUM.split(str(content or "")) if piece.strip()]


def split_reasoning(message: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(the reasoning of an assistant message, the texts of its answer)."""
    own = next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")
    content = message.get("content")
    if isinstance(content, str) and CLOSING in content:
        thought, _, answer = content.rpartition(CLOSING)
        return own.strip() or thought.rpartition(OPENING)[2].strip(), content_pieces({"content": answer})
    return own.strip(), content_pieces(message)


def _find(text: str, piece: str, at: int) -> tuple[int, int]:
    """Where `piece` stands from `at` on, as it is or as JSON writes it; (-1, -1) where it does not."""
    for form in _forms(piece):
        found = text.find(form, at)
        if found >= 0:
            return found, found + len(form)
    return -1, -1


def _forms(value: Any) -> Iterator[str]:
    """How templates write a text or a number."""
    if isinstance(value, str):
        yield value
        yield value.strip()
    written = json.dumps(value, ensure_ascii=False).removeprefix('"').removesuffix('"')
    yield written
    yield json.dumps(value).removeprefix('"').removesuffix('"')
    yield json.dumps(written, ensure_ascii=False).removeprefix('"').removesuffix('"')  # arguments that are JSON text
    yield repr(value).removeprefix("'").removesuffix("'")


def _leaves(value: Any) -> Iterator[Any]:
    """Names and values of a call or of a tool's parameters: each text, number and key; of JSON text its values."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "arguments" and isinstance(inner, str):
                with contextlib.suppress(ValueError):
                    inner = json.loads(inner)
            if key not in ("name", "arguments"):
                yield key
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _missing_calls(turn: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each call that is not in its turn, with the first name or value of it that is missing."""
    for call in calls:
        lacking = [leaf for leaf in _leaves(call) if not any(form in turn for form in _forms(leaf))]
        if lacking:
            yield f"({call.get('name')}): {lacking[0]}"


def missing_tools(text: str, tools: Any) -> Iterator[tuple[str, str]]:
    """(TOOL_MISSING, where) of each tool that is not described, with the first text of it that is missing."""
    for i, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        wanted = [function.get("name"), function.get("description"), *properties]
        lacking = [word for word in wanted if word and not any(form in text for form in _forms(word))]
        if lacking:
            yield TOOL_MISSING, f"tools[{i}] ({function.get('name')}): {str(lacking[0])[:60]}"
