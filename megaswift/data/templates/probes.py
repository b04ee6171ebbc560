"""Probes which parts of a conversation a chat template renders: tools, tool calls, messages of each role.

Owns the probes, each rendered once a template, and what is counted of a row whose parts it leaves out: such a row is
trained as transformers renders it. A template that raises for a probe is taken to write the part: the row itself then
shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megaswift.data.row_counters import (
    EMPTY_ANSWERS,
    UNKNOWN_ROLE,
    UNUSED_CALLS,
    UNUSED_MESSAGES,
    UNUSED_SYSTEM,
    UNUSED_TOOLS,
    WITHOUT_CONTENT,
    unknown_role_note,
)
from megaswift.data.templates.message_forms import NAME, PROBE_ID, MessageForms, Render, tools_of_probe
from megaswift.data.templates.roles import RESULTS, is_unknown_role
from megaswift.data.untokenized_sample import UntokenizedSample, says_nothing

_Message = Mapping[str, Any]
_ASK = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "x"}
_CALL = {"type": "function", "id": PROBE_ID, "function": {"name": "f", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SCHEMA = {"name": NAME, "description": "x", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _SCHEMA}
NAMED_ROLES = 8
"""Unknown roles that are counted by their names; data may have as many as it has speakers."""


class RenderedPartsProbe:
    """One template's answers."""

    def __init__(self, render: Render, forms: MessageForms) -> None:
        self._render = render
        self._forms = forms
        self._roles: dict[tuple[str, bool], bool] = {}
        self._unknown: dict[str, str] = {}

    def _writes(self, messages: Sequence[_Message], tools: Any = None) -> bool:
        text = self._render(messages, tools)
        return text is None or NAME in text

    @cached_property
    def tools(self) -> bool:
        """Whether it writes descriptions of tools."""
        return self._writes([_ASK], [_TOOL])

    def calls(self, tools: Any) -> bool:
        """Whether it writes an assistant's tool calls, in a conversation with or without tools."""
        return self._forms.writes_calls(tools)

    def role(self, role: str, tools: Any) -> bool:
        """Whether it writes messages of a role, in a conversation with or without tools."""
        key = role, bool(tools)
        if key not in self._roles:
            probe = {"role": role, "content": NAME}
            answer = {**probe, "name": "f", "tool_call_id": PROBE_ID}
            messages: list[_Message] = [probe, _ASK]
            if is_unknown_role(role):
                messages = [_ASK, _ANSWER, probe]
            elif role in RESULTS:
                messages = [_ASK, next(self._forms.forms([_CALLING], tools))[0], answer]
            self._roles[key] = self._writes(messages, tools_of_probe(tools))
        return self._roles[key]

    def _note_of_unknown(self, role: str) -> str:
        """What is counted of a message of an unknown role: by its name, if it is one of the first of these."""
        if role not in self._unknown and len(self._unknown) < NAMED_ROLES:
            self._unknown[role] = unknown_role_note(role)
        return self._unknown.get(role, UNKNOWN_ROLE)

    def notes(self, sample: UntokenizedSample, trained: Sequence[bool]) -> tuple[str, ...]:
        """What is counted of this row; `trained`: of each assistant message, whether it carries loss."""
        notes = [UNUSED_TOOLS] if sample.tools and not self.tools else []
        carries = iter(trained)
        for message in sample.messages:
            role = message["role"]
            if role != "assistant" and message.get("content") is None:
                notes.append(WITHOUT_CONTENT)
            if role == "user":
                continue
            if is_unknown_role(role):
                notes.append(self._note_of_unknown(role))
            if role == "assistant":
                if message.get("tool_calls") and not self.calls(sample.tools):
                    notes.append(UNUSED_CALLS)
                if next(carries, False) and says_nothing(message):
                    notes.append(EMPTY_ANSWERS)
            elif not self.role(role, sample.tools):
                notes.append(UNUSED_SYSTEM if role in ("system", "developer") else UNUSED_MESSAGES)
        return tuple(dict.fromkeys(notes)) if notes else ()
