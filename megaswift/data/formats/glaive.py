"""`system`: "SYSTEM: ..." with functions as JSON, and `chat`: "USER: ... ASSISTANT: ... FUNCTION RESPONSE: ...", as
Glaive's function calling data have them."""

from __future__ import annotations

import json
import re
from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    describe_value,
    text_in_column,
)

ROLE_OF = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
END = "<|endoftext|>"
CALL = "<functioncall>"
SPEAKER = f"({'|'.join(ROLE_OF)}):"
AT_LINE_BEGIN = re.compile(rf"(?:\A|\n|{re.escape(END)})\s*{SPEAKER}")
AT_WORD_BEGIN = re.compile(rf"(?:\A|\s){SPEAKER}")
"""For a chat that is one line."""
FUNCTIONS = re.compile(r"\[\s*\{|\{\s*\"")
QUOTED_ARGUMENTS = re.compile(r"(\{.*\"arguments\"\s*:\s*)'(.*)'(\s*\})", re.DOTALL)
"""Glaive writes the arguments, which are JSON, between single quotes, so that the call is no JSON."""


def _system_and_tools(text: str) -> tuple[str, list[dict[str, Any]] | None]:
    """(the text before the functions, the functions as OpenAI's tools)."""
    text = text.strip().removeprefix("SYSTEM:").strip()
    begin = FUNCTIONS.search(text)
    if begin is None:
        return text, None
    decoder = json.JSONDecoder(strict=False)
    at = begin.start()
    found = []
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            raise RowError("system", describe_value(text[at:]), "functions as JSON up to the end") from None
        found += value if isinstance(value, list) else [value]
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
    wrapped = [f if not isinstance(f, dict) or "function" in f else {"type": "function", "function": f} for f in found]
    return text[: begin.start()].strip(), wrapped


def _call(text: str) -> dict[str, Any]:
    text = text.strip().removesuffix("</functioncall>").strip()
    try:
        if quoted := QUOTED_ARGUMENTS.fullmatch(text):
            begin, arguments, end = quoted.groups()
            given = json.loads(arguments.replace("\\'", "'"), strict=False) if arguments.strip() else {}
            call = json.loads(f"{begin}null{end}", strict=False) | {"arguments": given}
        else:
            call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RowError("chat", describe_value(text), f"""{CALL} {{"name": ..., "arguments": '{{...}}'}}""")
    return {"type": "function", "function": call}


def _message(speaker: str, text: str) -> dict[str, Any]:
    text = text.strip().removesuffix(END).strip()
    if speaker != "ASSISTANT" or CALL not in text:
        return {"role": ROLE_OF[speaker], "content": text}
    content, *calls = text.split(CALL)
    made = [_call(call.strip().removesuffix(END)) for call in calls]
    return {"role": "assistant", "content": content.strip(), "tool_calls": made}


def _is_chat(row: Row) -> bool:
    return isinstance(row["chat"], str) and AT_LINE_BEGIN.match(row["chat"]) is not None


def parse(row: Row) -> UntokenizedSample:
    """Speakers become roles, calls in the text become tool calls, functions become tools."""
    system, tools = _system_and_tools(text_in_column(row, "system", optional=True))
    chat = row["chat"].strip()
    speaker = AT_LINE_BEGIN if "\n" in chat else AT_WORD_BEGIN
    _, *found = speaker.split(chat)
    messages = [_message(*turn) for turn in zip(found[::2], found[1::2], strict=True)]
    return checked_conversation_sample(messages, "chat", system, tools)


FORMATS.register("glaive", RowFormat("glaive", ("chat",), parse, ("system",), detect=_is_chat, rank=6))
