"""`conversations`: [{"from": "human" | "gpt" | ..., "value"}], as ShareGPT dumps and LLaVA have them; also role/content
inside."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Format, Row
from megaswift.data.sample import ROLES, RowError, Sample, conversation, decoded, describe, string

ROLE_OF = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool_response": "tool",
} | {r: r for r in ROLES if r != "observation"}


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowError(where, describe(turn), 'an object {"from": ..., "value": ...}')
    if "role" in turn and "from" not in turn:
        return turn
    speaker = turn.get("from")
    if speaker == "function_call":
        call = decoded(turn.get("value"), f"{where}.value", "a JSON function call")
        calls = call if isinstance(call, list) else [call]
        loss = {"loss": turn["loss"]} if "loss" in turn else {}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": c} for c in calls],
        } | loss
    if not isinstance(speaker, str) or speaker not in ROLE_OF:
        raise RowError(f"{where}.from", describe(speaker), "one of " + ", ".join([*ROLE_OF, "function_call"]))
    if "value" not in turn:
        raise RowError(f"{where}.value", "nothing", "a string")
    return {k: v for k, v in turn.items() if k not in ("from", "value")} | {
        "role": ROLE_OF[speaker],
        "content": turn["value"],
    }


def parse(row: Row) -> Sample:
    """Speakers become roles, values become contents."""
    turns = decoded(row["conversations"], "conversations", "a list of turns")
    if not isinstance(turns, list):
        raise RowError("conversations", describe(turns), "a list of turns")
    messages = [_turn(t, f"conversations[{i}]") for i, t in enumerate(turns)]
    return conversation(messages, "conversations", string(row, "system", optional=True), row.get("tools"))


FORMATS.register("conversations", Format("conversations", ("conversations",), parse, ("tools", "system"), rank=2))
