"""Writes a conversation's tools, tool calls and their results as text, as `--agent_template react_en` and others do.

The tools go into the system message. A call, its result and what the assistant writes next are one turn of the
assistant, in which results carry no loss. Instructions and words belong to `agent_instructions.py`, finding the
parts in the rendered text to `render.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift.data.templates.agent_instructions import AGENT_TEXT_FORMATS, AgentTextFormat
from megaswift.data.templates.roles import RESULTS
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    decode_json_cell,
    describe_value,
    is_data,
    is_parts,
)

SYSTEM = ("system", "developer")
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class TurnPart:
    """A part of an assistant's turn."""

    text: str
    turn: int | None
    """Which assistant message of the row it is; None: a tool's result."""


@dataclass(frozen=True)
class AgentTextConversation:
    """A conversation without tools, tool calls and tool messages."""

    sample: UntokenizedSample
    """The `loss` of each assistant message says whether any part of it carries loss."""
    parts: tuple[tuple[TurnPart, ...], ...]
    """The parts of each assistant message in order; their texts are its content."""
    drops_system: bool = False
    """Whether the row's own system message gave way to the instructions."""


def write_tools_as_agent_text(sample: UntokenizedSample, name: str, trained: Sequence[bool]) -> AgentTextConversation:
    """`trained`: of each assistant message, whether it carries loss. RowError for what the format cannot say."""
    form = AGENT_TEXT_FORMATS[name]
    messages: list[dict[str, Any]] = []
    parts: list[list[TurnPart]] = []
    turn = -1
    for i, message in enumerate(sample.messages):
        where = f"messages[{i}]"
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        if message["role"] in RESULTS:
            text = _text(message, where)
            if continues:
                _add_result(parts[-1], text, form)
            else:
                messages[-1:] = [_asked_with_result(messages[-1:], text, form, where)]
        elif message["role"] == "assistant":
            turn += 1
            said = TurnPart(_text(message, where) + _calls(message, form, where), turn)
            if continues and any(message.get(key) for key in REASONING):
                raise RowError(where, "reasoning within a turn that has begun", "reasoning in the turn's first message")
            if continues:
                parts[-1].append(said)
            else:
                messages.append({k: v for k, v in message.items() if k != "tool_calls"})
                parts.append([said])
        else:
            messages.append(dict(message))
    turns = iter(parts)
    flags: list[bool | None] = []
    for message in messages:
        own = next(turns) if message["role"] == "assistant" else None
        if own is not None:
            message["content"] = "".join(part.text for part in own)
        flags.append(None if own is None else any(p.turn is not None and trained[p.turn] for p in own))
    drops = _describe_tools(messages, flags, sample.tools, form)
    plain = UntokenizedSample(tuple(messages), tuple(flags))
    return AgentTextConversation(plain, tuple(tuple(own) for own in parts), drops)


def _describe_tools(
    messages: list[dict[str, Any]], flags: list[bool | None], tools: Sequence[Mapping[str, Any]] | None, form: Any
) -> bool:
    """Puts the tools into the system message; whether the row's own one is lost by that."""
    if not tools:
        return False
    own = messages[0] if messages and messages[0]["role"] in SYSTEM else None
    text = form.system(tools, "" if own is None else _text(own, "messages[0]"))
    if own is None:
        messages.insert(0, {"role": "system", "content": text})
        flags.insert(0, None)
    else:
        messages[0] = {**own, "content": text}
    return own is not None and not form.keeps_system


def _text(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if is_parts(content) and all(p["type"] == "text" for p in content):
        return "".join(p["text"] for p in content)
    if message["role"] in RESULTS and is_data(content):
        return json.dumps(content, ensure_ascii=False)
    if content is not None and not isinstance(content, str):
        raise RowError(f"{where}.content", describe_value(content), "text: the format of --agent_template is text")
    return content or ""


def _calls(message: Mapping[str, Any], form: AgentTextFormat, where: str) -> str:
    """The calls of a message behind its text, on lines of their own, and the word that a result follows."""
    calls = message.get("tool_calls")
    if not calls:
        return ""
    text = _text(message, where)
    written = ["\n" if text and not text.endswith("\n") else ""]
    for call in calls:
        function = call.get("function") or call
        name = function.get("name")
        arguments = function.get("arguments")
        if not isinstance(name, str):
            raise RowError(f"{where}.tool_calls", describe_value(dict(call)), "calls with a name")
        arguments = function.get("parameters") if arguments is None else arguments
        arguments = decode_json_cell(arguments, f"{where}.tool_calls", "arguments as a JSON object")
        given = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        written.append(f"{form.action} {name}\n{form.arguments} {given}\n")
    return "".join([*written, form.result])


def _add_result(parts: list[TurnPart], text: str, form: AgentTextFormat) -> None:
    """A result behind the word for it; several results of a call in the order given."""
    follows = parts[-1].turn is None
    said = next(i for i in reversed(range(len(parts))) if parts[i].turn is not None)
    before = parts[said].text
    if not (form.action in before and form.arguments in before):
        parts.append(TurnPart(text, None))
        return
    if not before.endswith(form.result):
        gap = "" if before.endswith("\n") else "\n"
        parts[said] = replace(parts[said], text=before + gap + form.result)
    ended = text if text.endswith("\n") else text + "\n"
    parts.append(TurnPart((form.result if follows else "") + ended, None))


def _asked_with_result(
    before: Sequence[dict[str, Any]], text: str, form: AgentTextFormat, where: str
) -> dict[str, Any]:
    """A user's message with the result that follows it."""
    if not before or before[0]["role"] != "user" or not form.result_after_user:
        raise RowError(where, "a tool message that follows no assistant message", "a result behind its call")
    return {**before[0], "content": f"{_text(before[0], where)}\n{form.result}\n{text}"}


def locate_turn_parts(text: str, begin: int, end: int, parts: Sequence[TurnPart]) -> list[tuple[int, int]]:
    """The characters of each part of the turn text[begin:end]: the first begins and the last ends with the turn.
    RowError where the chat template has changed the content."""
    if len(parts) == 1:
        return [(begin, end)]
    content = "".join(part.text for part in parts)
    bare = content.lstrip()
    at = text.find(bare.rstrip(), begin, end)
    if at < 0:
        raise RowError(
            "messages",
            "the chat template changes the assistant's text, so tool results within it cannot be located",
            "a chat template that writes contents as they are (--template chatml)",
        )
    at -= len(content) - len(bare)
    edges = [begin]
    for part in parts[:-1]:
        at += len(part.text)
        edges.append(min(max(at, edges[-1]), end))
    return list(zip(edges, [*edges[1:], end], strict=True))
