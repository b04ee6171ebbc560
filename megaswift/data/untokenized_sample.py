"""One training example before tokens: a conversation or a text.

Owns `UntokenizedSample`, `RowError` and the checks that every format shares (roles, contents, tools). Which columns a
file has belongs to `megaswift.data.formats`; how a conversation becomes text belongs to
`megaswift.data.templates.render`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from megaswift.data.sources import json_text
from megaswift.data.templates.message_loss import MessageLoss, UniformLoss, loss_flag
from megaswift.data.templates.roles import (
    KNOWN,
    RESULTS,
    TOOL_CALL,
    canonical_role_or_none,
    merge_tool_calls_into_turns,
)
from megaswift.errors import without_control_characters


class RowError(Exception):
    """A row that a format cannot read: the column, what is wrong and what was expected."""

    fix = ""
    """What to type, where that is known."""

    def __init__(self, column: str, found: str, expected: str) -> None:
        self.column = without_control_characters(column)
        self.found = found
        self.expected = expected
        super().__init__(f"column {column!r}: {found}; expected {expected}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes from rank to rank."""
        return type(self), (self.column, self.found, self.expected)

    @property
    def where(self) -> str:
        """The place in the row, for messages."""
        return f"column {self.column}"


class LineError(RowError):
    """A line or item that is no row at all; its place in the line stands for the column."""

    @property
    def where(self) -> str:
        """The place in the line, for messages."""
        return self.column


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its reasoning."""
LOSS_FLAGS = ("loss", "weight", "loss_weight", "train", "training")
"""Fields of a message that include it in the loss or exclude it: ours, and those of OpenAI and ShareGPT, LLaMA-Factory
and axolotl."""
PARTS_OF_LOSS = ("train_detail", "training_detail")
"""axolotl's fields for parts of a message."""
LOSS_FIELDS = (*LOSS_FLAGS, "loss_scale", *PARTS_OF_LOSS)
"""Fields of a message that chat templates do not read."""


ROLE_EXPECTED = f"a string, such as one of {KNOWN}"


@dataclass(frozen=True)
class UntokenizedSample:
    """A conversation (`messages`, as the chat template takes them) or a plain `text`."""

    messages: tuple[dict[str, Any], ...] = ()
    loss: tuple[MessageLoss, ...] = ()
    """Per message."""
    tools: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    prompt: str | None = None
    """The text before a plain `text` that carries loss; it carries none."""


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether an assistant message says and calls nothing."""
    content = message.get("content")
    if isinstance(content, str) and content and not content.isspace() or message.get("tool_calls"):
        return False
    if is_parts(content) and any(p["type"] != "text" or p["text"].strip() for p in content):
        return False
    if is_data(content):
        return False
    return not any(message.get(key) for key in REASONING)


def describe_value(value: Any) -> str:
    """A value of the user's in a few words for a message."""
    if value is None:
        return "nothing"
    try:
        shown = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, values that hold themselves
        shown = repr(type(value))
    short = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{type(value).__name__} {without_control_characters(short)}"


def decode_json_cell(value: Any, column: str, expected: str) -> Any:
    """A nested value that a flat file (CSV, Parquet) may hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json_text.parse_json(value)
    except json_text.JsonError as e:
        where = "" if e.where == "line" else f" at {e.where}"
        raise RowError(column, f"{describe_value(value)}{where}: {e.found}", expected) from None


def text_in_column(row: Mapping[str, Any], column: str, optional: bool = False) -> str:
    """The text in `column`; "" for a missing optional one. `system_prompt` is another name of `system`, as in
    ms-swift."""
    value = row.get(column)
    if value is None and column == "system" and isinstance(row.get("system_prompt"), str):
        value = row["system_prompt"]
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise RowError(column, describe_value(value), "a string")
    return value


def is_parts(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a content is a list of parts, each with a `type`; texts of text parts are strings."""
    if not isinstance(content, list):
        return False
    return all(
        isinstance(part, Mapping)
        and isinstance(part.get("type"), str)
        and (part["type"] != "text" or isinstance(part.get("text"), str))
        for part in content
    )


def is_data(content: Any) -> bool:
    """Whether a content is neither text nor parts: other JSON, as tools return it."""
    return content is not None and not isinstance(content, str) and not is_parts(content)


def is_json(value: Any) -> bool:
    """Whether a value may come from JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float)


def _content(message: Mapping[str, Any], role: str, where: str) -> None:
    """RowError for a content that no template can be given: the template decides about every other."""
    content = message.get("content")
    if content is None and role not in RESULTS and "content" not in message:
        named = [key for key in message if _holds_text(message, key)]
        if named and not message.get("tool_calls") and not any(message.get(key) for key in REASONING):
            raise RowError(f"{where}.content", f"nothing, but a text in {named[0]!r}", "a string in `content`")
    if not is_json(content):
        raise RowError(f"{where}.content", describe_value(content), "what JSON can hold")


def _holds_text(message: Mapping[str, Any], key: str) -> bool:
    """Whether a field, such as a misspelled `content`, holds a text that the message may be meant to say."""
    return key not in ("role", "name", "id") and isinstance(message[key], str) and bool(message[key])


def _message(message: Any, where: str) -> tuple[dict[str, Any], MessageLoss]:
    if not isinstance(message, Mapping):
        raise RowError(where, describe_value(message), 'an object {"role": ..., "content": ...}')
    role = canonical_role_or_none(message.get("role"))
    if role is None:
        raise RowError(f"{where}.role", describe_value(message.get("role")), ROLE_EXPECTED)
    if role == TOOL_CALL:
        return _call(message, where), _loss(message, where)
    message = _with_decoded_calls(_with_parts_as_fields(message, where), where)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(c, Mapping) for c in calls)):
        raise RowError(f"{where}.tool_calls", describe_value(calls), "a list of objects")
    _content(message, role, where)
    loss = _loss(message, where)
    if role != "assistant":
        loss = loss_flag(loss)
        if loss:
            name = next(name for name in LOSS_FLAGS if message.get(name))
            given = "true" if message[name] is True else describe_value(message[name])
            raise RowError(f"{where}.{name}", f"{given} on a {role} message", f"{given} on assistant messages only")
    fields = {k: v for k, v in message.items() if k not in LOSS_FIELDS and v is not None}
    fields.pop("tool_calls", None)
    if calls:  # many templates fail for an empty list
        fields["tool_calls"] = [{k: v for k, v in call.items() if v is not None} for call in calls]
    return fields if fields["role"] == role else fields | {"role": role}, loss


def _with_parts_as_fields(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A message whose parts are LLaMA-Factory v1's, `{"type", "value"}`, in the form of chat templates: text alone as a
    string, reasoning and tool calls as fields of the message."""
    content = message.get("content")
    if not isinstance(content, list) or not any(_holds_value(part) for part in content):
        return message
    where = f"{where}.content"
    kept: list[dict[str, Any]] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise RowError(where, describe_value(part), 'a part {"type": ..., "value": ...}')
        kind = part["type"]
        if not _holds_value(part):
            kept.append(dict(part))
        elif kind == "tool_call":
            calls += _calls(part["value"], where)
        elif not isinstance(part["value"], str):
            raise RowError(where, describe_value(part), f"a {kind} part with a string `value`")
        elif kind == "reasoning":
            reasoning.append(part["value"])
        else:
            kept.append({"type": kind, kind: part["value"]})
    changed: dict[str, Any] = {**message, "content": kept}
    if all(part["type"] == "text" and isinstance(part.get("text"), str) for part in kept):
        changed["content"] = "".join(part["text"] for part in kept)
    if reasoning:
        changed["reasoning_content"] = "".join(reasoning)
    if calls:
        changed["tool_calls"] = calls
    return changed


def _holds_value(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("value") is not None


def _with_decoded_calls(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A message with the calls of its field as a list: from JSON text, or from OpenAI's former `function_call`."""
    calls = message.get("tool_calls")
    former = message.get("function_call")
    if isinstance(calls, str):
        calls = decode_json_cell(calls, f"{where}.tool_calls", "a list of objects") if calls.strip() else None
        return {**message, "tool_calls": calls}
    if not calls and isinstance(former, Mapping) and isinstance(former.get("name"), str):
        rest = {k: v for k, v in message.items() if k != "function_call"}
        return {**rest, "tool_calls": [{"type": "function", "function": dict(former)}]}
    return message


def _loss(message: Mapping[str, Any], where: str) -> MessageLoss:
    flag: bool | None = None
    for name in LOSS_FLAGS:
        given = message.get(name)
        if given is None:
            continue
        if given not in (0, 1):
            fault = describe_value(given)
            fraction = isinstance(given, int | float)
            fault += ", a weight of one message, which is not supported" if fraction else ""
            raise RowError(f"{where}.{name}", fault, "true or false" if name == "loss" else "0, 1, false or true")
        flag = bool(given) and flag is not False  # a message is excluded if any of its fields says so
    for name in PARTS_OF_LOSS:
        if message.get(name):
            fault = f"{describe_value(message[name])}, which is not supported"
            raise RowError(f"{where}.{name}", fault, "`train` of the whole message; --loss_scale FILE.json for parts")
    scale = message.get("loss_scale")  # ms-swift's
    if scale is None:
        return flag
    if isinstance(scale, bool) or scale not in (0, 1):
        fault = f"{describe_value(scale)}, a weight of one message, which is not supported"
        raise RowError(f"{where}.loss_scale", fault, "1, or 0 for no loss; --loss_scale NAME or FILE.json for parts")
    return False if scale == 0 or flag is False else UniformLoss(flag)


def _call(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The calls of a turn that is one function call, or a list of them, as JSON."""
    return {"role": TOOL_CALL, "tool_calls": _calls(message.get("content"), f"{where}.content")}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    call = decode_json_cell(value, where, "a JSON function call")
    calls = call if isinstance(call, list) else [call]
    if not calls or not all(isinstance(c, Mapping) and isinstance(c.get("name"), str) for c in calls):
        raise RowError(where, describe_value(call), 'a function call: {"name": ..., "arguments": {...}}')
    return [{"type": "function", "function": dict(c)} for c in calls]


def checked_conversation_sample(
    messages: Any, column: str, system: str | None = None, tools: Any = None
) -> UntokenizedSample:
    """A checked conversation from messages in the template's form; `system` goes first when they have none."""
    messages = decode_json_cell(messages, column, "a list of messages")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RowError(column, describe_value(messages), "a list of at least one message")
    checked = [_message(m, f"{column}[{i}]") for i, m in enumerate(messages)]
    if any(m["role"] == TOOL_CALL for m, _ in checked):
        checked = merge_tool_calls_into_turns(checked)
    if system and checked[0][0]["role"] not in ("system", "developer"):
        checked.insert(0, ({"role": "system", "content": system}, None))
    return UntokenizedSample(tuple(m for m, _ in checked), tuple(flag for _, flag in checked), _tools(tools))


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str):
        tools = decode_json_cell(tools, "tools", "a list of tool descriptions") if tools.strip() else None
    if tools is None:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    listed = (
        [decode_json_cell(t, "tools", "tool descriptions") for t in tools] if isinstance(tools, (list, tuple)) else None
    )
    if listed is None or not all(isinstance(t, Mapping) for t in listed):
        raise RowError("tools", describe_value(tools), "an object or a list of objects (JSON schemas of functions)")
    return tuple(dict(t) for t in listed) or None


def with_default_system_message(sample: UntokenizedSample, system: str | None) -> UntokenizedSample:
    """The sample with the run's default system message where the row brought none."""
    if not system or not sample.messages or sample.messages[0]["role"] in ("system", "developer"):
        return sample
    return UntokenizedSample(
        ({"role": "system", "content": system}, *sample.messages), (None, *sample.loss), sample.tools
    )


def text_or_messages_in_column(row: Mapping[str, Any], column: str) -> str | UntokenizedSample:
    """A text, or messages (a list, one object, or JSON text of either)."""
    value: Any = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")) and '"role"' in value:
        value = decode_json_cell(value, column, "a list of messages")
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple, dict)):
        raise RowError(column, describe_value(value), "a string or a list of messages")
    return checked_conversation_sample([value] if isinstance(value, dict) else value, column)


def reject_chat_only_columns(row: Mapping[str, Any]) -> None:
    """RowError for what only a chat template could write into plain texts."""
    for column in ("system", "tools"):
        if row.get(column):
            raise RowError(
                column,
                "cannot be combined with plain text, which is trained without a chat template",
                "messages instead of plain text",
            )
