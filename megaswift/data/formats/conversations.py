"""`conversations`: [{"from": "human" | "gpt" | ..., "value"}], as ShareGPT dumps and LLaVA have them; also role/content
inside."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.role_aliases_and_tool_call_turns import KNOWN, TURN_ROLE_OF, canonical_role_or_none
from megaswift.data.untokenized_sample import (
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    decode_json_cell,
    describe_value,
    text_in_column,
)


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowError(where, describe_value(turn), 'an object {"from": ..., "value": ...}')
    if "role" in turn and "from" not in turn:
        return turn
    role = canonical_role_or_none(turn.get("from"), TURN_ROLE_OF)
    if role is None:
        raise RowError(f"{where}.from", describe_value(turn.get("from")), f"one of {KNOWN}")
    if "value" not in turn:
        raise RowError(f"{where}.value", "nothing", "a string")
    return {k: v for k, v in turn.items() if k not in ("from", "value")} | {"role": role, "content": turn["value"]}


def parse(row: Row) -> UntokenizedSample:
    """Speakers become roles, values become contents."""
    turns = decode_json_cell(row["conversations"], "conversations", "a list of turns")
    if not isinstance(turns, list):
        raise RowError("conversations", describe_value(turns), "a list of turns")
    messages = [_turn(t, f"conversations[{i}]") for i, t in enumerate(turns)]
    return checked_conversation_sample(
        messages, "conversations", text_in_column(row, "system", optional=True), row.get("tools")
    )


FORMATS.register("conversations", RowFormat("conversations", ("conversations",), parse, ("tools", "system"), rank=2))
