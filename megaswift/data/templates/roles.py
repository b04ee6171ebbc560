"""Roles in conversations: those of chat templates, and the aliases that data sets use.

Owns the table of names, and tool calls that are turns of their own. What a template does with a role is its own
matter (`probes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megaswift.data.templates.message_loss import MessageLoss, UniformLoss, loss_flag

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Go to the chat template as they are, and so does every role that has no name here."""
RESULTS = ("tool", "function", "ipython", "observation")
"""Roles of a call's result."""
TOOL_CALL = "tool_call"
"""A turn of its own that holds one function call as JSON, as ms-swift has it."""
OTHER_NAMES = MappingProxyType(
    {
        "human": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "ai": "assistant",
        "tool_response": "tool",
        "function_call": TOOL_CALL,
        "function_response": "tool",
    }
)
"""Names of roles in ShareGPT, ms-swift and others; upper and lower case alike."""
ROLE_OF: Mapping[str, str] = {**{role: role for role in (*ROLES, TOOL_CALL)}, **OTHER_NAMES}
"""The role of each name in lower case."""
TURN_ROLE_OF: Mapping[str, str] = {**ROLE_OF, "observation": "tool"}
"""The same in `conversations`, where ShareGPT's `observation` is a tool's answer."""
KNOWN = ", ".join([*ROLES, TOOL_CALL, *OTHER_NAMES])


def is_unknown_role(role: str) -> bool:
    """Whether messages of this role are whatever the chat template makes of them, and carry no loss."""
    return role not in ROLES


def canonical_role_or_none(name: Any, roles: Mapping[str, str] = ROLE_OF) -> str | None:
    """The role of this name, which is the name itself where it has no other; None for what is not text."""
    return roles.get(name.lower(), name) if isinstance(name, str) else None


Checked = tuple[dict[str, Any], MessageLoss]


def merge_tool_calls_into_turns(messages: Iterable[Checked]) -> list[Checked]:
    """Messages in which tool calls belong to the assistant's turn before them, or to one of their own. A `loss_scale`
    of either is the turn's."""
    out: list[Checked] = []
    for message, loss in messages:
        if message["role"] != TOOL_CALL:
            out.append((message, loss))
            continue
        calls = message["tool_calls"]
        if out and out[-1][0]["role"] == "assistant" and loss_flag(loss) in (None, loss_flag(out[-1][1])):
            before, own = out.pop()
            if isinstance(loss, UniformLoss) and own is not False:
                own = UniformLoss(loss_flag(own))
            out.append(({**before, "tool_calls": [*before.get("tool_calls", ()), *calls]}, own))
        else:
            out.append(({"role": "assistant", "content": "", "tool_calls": calls}, loss))
    return out
