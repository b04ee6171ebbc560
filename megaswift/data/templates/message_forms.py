"""Chooses the form in which a chat template writes tool calls, whatever dialect a row is written in.

Some templates take a call's arguments as an object and some as JSON text; some write a call only where the content is
null, and others fail there. Each form is tried in a short conversation, once a template; a row then goes to the
template in the first form that writes the whole call, without quoting JSON a second time. Owns the forms and the
choice; what a row may say belongs to `untokenized_sample.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile, zip_longest
from typing import Any

from megaswift.data.templates.roles import RESULTS

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Any], str | None]
"""The text of messages and tools; None where the template refuses them."""
QUESTION = "megaswiftquestion"
NAME = "megaswiftprobe"
KEY = "megaswiftkey"
VALUE = "megaswiftvalue"
PROBE_ID = "abcdefghi"
"""The id of a probe's call: nine letters, which Mistral's templates require."""
ASK = {"role": "user", "content": QUESTION}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}, "required": []}},
}
_RESULT = {"role": "tool", "content": "x", "name": NAME, "tool_call_id": PROBE_ID}
_AFTER = (_RESULT, {"role": "assistant", "content": "y"})
ABSENT = "absent"
EMPTY_CONTENTS: dict[str, tuple[str | None, ...]] = {"": ("", None, ABSENT), "null": (ABSENT, None, ""), "text": ("",)}
"""What may stand for a content that is "", null or a text: as the row has it first. transformers leaves out what is
null; its older releases did not, and some templates ask for null."""
NO_IDS = ""
"""Calls without an id stay without one."""
LETTERS = "letters"
"""Calls without an id get nine letters and digits."""
NAMES = "names"
"""Calls without an id get the function's name and a number."""
_IDS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# How a form comes out, the best first.
WRITTEN = 4
"""As JSON or in the template's own notation."""
MANGLED = 3
"""Quoted twice, or as Python writes it."""
NAMED = 2
"""Without its arguments."""
OMITTED = 1
"""Not at all."""
REJECTED = 0
"""The template raises."""


@dataclass(frozen=True)
class CallForm:
    """One way to hand a call to a template."""

    text: bool
    """Arguments as JSON text, else as an object."""
    bare: bool
    """The call as `{"name", "arguments"}`, else within `{"type", "function"}`."""
    empty: str | None
    """What stands for a content that is empty or null: "", None or ABSENT."""

    def message(self, message: Message) -> dict[str, Any]:
        """The message in this form."""
        content = message.get("content")
        changed = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        if content is None or content == "":
            changed.pop("content", None)
            if self.empty != ABSENT:
                changed["content"] = self.empty
        return changed

    def _call(self, call: Message) -> dict[str, Any]:
        function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else dict(call)
        own = {key: function.pop(key) for key in ("id", "type") if key in function and function is not call}
        arguments = object_of_arguments(function.get("arguments"))
        if self.text and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = arguments
        around = {key: value for key, value in call.items() if key != "function"} if "function" in call else own
        if self.bare:
            return {key: value for key, value in around.items() if key != "type"} | function
        return {"type": "function", **around, "function": function}


def object_of_arguments(arguments: Any) -> Any:
    """Arguments as an object: JSON text is parsed, nothing is an empty object; other text stays."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


class MessageForms:
    """The forms of calls that one template writes."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._best: dict[tuple[bool, str], tuple[CallForm, int]] = {}
        self._ids: dict[bool, str] = {}

    def writes_calls(self, tools: Any) -> bool:
        """Whether the template writes a call without content, in a conversation with or without tools. One that raises
        for every form is taken to write it: the row then shows why."""
        return self._learnt(tools, "")[1] != OMITTED

    def call_text(self, tools: Any) -> str:
        """What the template writes after a question for a call; empty where it writes none."""
        text = self._render([ASK, self._learnt(tools, "")[0].message(_probe(""))], tools_of_probe(tools)) or ""
        after = text.rpartition(QUESTION)[2]
        return after if NAME in after else ""

    def forms(self, messages: Sequence[Message], tools: Any) -> Iterator[list[dict[str, Any]]]:
        """The messages in each form that may do, the best first."""
        calling = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("tool_calls")]
        if not calling:
            yield from _with_contents(messages)
            return
        # The form that suits each message by itself
        best = [dict(m) for m in messages]
        for i in calling:
            best[i] = self._learnt(tools, _kind_of_content(messages[i]))[0].message(messages[i])
        lack_ids = any("id" not in call for i in calling for call in best[i]["tool_calls"])
        ids = self._needed_ids(tools) if lack_ids else NO_IDS
        if ids != NO_IDS:
            best = _with_ids(best, ids)
        yield from _with_contents(best)
        # What one message cannot show: templates that ask for an id in longer conversations
        if lack_ids and ids == NO_IDS:
            yield from _with_contents(_with_ids(best, LETTERS))
        yield [dict(m) for m in messages]

    def _needed_ids(self, tools: Any) -> str:
        """The ids without which a call is not written: Mistral's templates need LETTERS, Kimi's NAMES, most NO_IDS."""
        key = bool(tools)
        if key not in self._ids:
            form, quality = self._learnt(tools, "")
            bare = _probe("")
            del bare["tool_calls"][0]["id"]
            text = self._render([ASK, form.message(bare)], tools_of_probe(tools))
            unnamed = bool(text) and NAME not in str(text).rpartition(QUESTION)[2]
            needed = NAMES if unnamed else LETTERS
            self._ids[key] = needed if quality > _quality(text) else NO_IDS
        return self._ids[key]

    def _learnt(self, tools: Any, content: str) -> tuple[CallForm, int]:
        """(the best form, how it comes out) of calls beside a content of this kind: a key of `EMPTY_CONTENTS`."""
        key = bool(tools), content
        if key not in self._best:
            self._best[key] = self._learn(tools, content)
        return self._best[key]

    def _learn(self, tools: Any, content: str) -> tuple[CallForm, int]:
        # Candidates: the content as the row has it first, in either form of the arguments
        empties = EMPTY_CONTENTS[content]
        forms = [CallForm(*one) for one in product((False, True), (False, True), empties)]
        forms.sort(key=lambda form: (form.bare, empties.index(form.empty), form.text))
        # The first that comes out best: in a conversation that ends with the call, else in one that goes on
        best = forms[0], REJECTED
        for after in ((), _AFTER):
            for form in forms:
                message = form.message(_probe("z" if content == "text" else ""))
                quality = _quality(self._render([ASK, message, *after], tools_of_probe(tools)))
                if quality > best[1] and not (after and quality == NAMED):  # a result may name the function too
                    best = form, quality
                if quality == WRITTEN:
                    return best
        return best


def _kind_of_content(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return "null"
    return "" if content == "" else "text"


def _with_contents(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The messages as they are, then with empty contents in place of null or absent ones: first in messages without
    calls alone, as a template may write a call only beside null."""
    yield [dict(m) for m in messages]
    for kept in ("tool_calls", "content"):
        if any(m.get("content") is None and not m.get(kept) for m in messages):
            yield [{**m, "content": ""} if m.get("content") is None and not m.get(kept) else dict(m) for m in messages]


def _probe(content: str) -> dict[str, Any]:
    call = {"type": "function", "id": PROBE_ID, "function": {"name": NAME, "arguments": {KEY: VALUE}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


CALLING = _probe("")
"""A call without content."""


def tools_of_probe(tools: Any) -> list[Any] | None:
    """A tool for a probe of conversations that have tools."""
    return [_TOOL] if tools else None


def _quality(text: str | None) -> int:
    if text is None:
        return REJECTED
    after = text.rpartition(QUESTION)[2]
    named = NAME in after or PROBE_ID in after  # Kimi's models write the id
    if not named or KEY not in after or VALUE not in after:
        return NAMED if named else OMITTED
    mangled = f'\\"{KEY}' in after or f"'{KEY}'" in after or "None" in after
    return MANGLED if mangled else WRITTEN


def _with_ids(messages: Sequence[Message], style: str) -> list[dict[str, Any]]:
    """Calls and their results with ids where they have none: NAMES, or LETTERS where the call's result has none
    either."""
    changed: list[dict[str, Any]] = []
    open_ids: list[str] = []
    number = 0
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = []
            results = takewhile(_is_result, messages[i + 1 :])
            for call, result in zip_longest(message["tool_calls"], results):
                if call is None:
                    break
                name = (call.get("function") or call).get("name")
                own = (result or {}).get("tool_call_id") or _nine_letters(number)
                calls.append({"id": f"functions.{name}:{number}" if style == NAMES else own, **call})
                number += 1
            open_ids = [str(call["id"]) for call in calls]
            changed.append({**message, "tool_calls": calls})
        elif _is_result(message) and open_ids:
            changed.append({"tool_call_id": open_ids.pop(0), **message})
        else:
            changed.append(dict(message))
    return changed


def _is_result(message: Message) -> bool:
    return message["role"] in RESULTS


def _nine_letters(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).digest()
    return "".join(_IDS[byte % len(_IDS)] for byte in digest[:9])
