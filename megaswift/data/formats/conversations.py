"""`conversations`: [{"from": "human" | "gpt" | ..., "value"}], as ShareGPT dumps and LLaVA have them; also role/content
inside."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.templates.roles import TURN_ROLE_OF, canonical_role_or_none
from megaswift.data.untokenized_sample import (
    ROLE_EXPECTED,
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    decode_json_cell,
    describe_value,
    text_in_column,
)


def _turn(turn: Any, where: str) -> Any:
    """A turn with its speaker as a role; a message with a role stays."""
    if not isinstance(turn, dict) or turn.get("from") is None:
        return turn
    role = canonical_role_or_none(turn["from"], TURN_ROLE_OF)
    if role is None:
        raise RowError(f"{where}.from", describe_value(turn["from"]), ROLE_EXPECTED)
    fields = {k: v for k, v in turn.items() if k not in ("from", "value") and v is not None}
    return fields | {"role": role} | ({"content": turn["value"]} if "value" in turn else {})


def sample_of_turns(row: Row, column: str) -> UntokenizedSample:
    """The conversation of a column of turns or messages."""
    turns = decode_json_cell(row[column], column, "a list of turns")
    if not isinstance(turns, list):
        raise RowError(column, describe_value(turns), "a list of turns")
    messages = [_turn(t, f"{column}[{i}]") for i, t in enumerate(turns)]
    return checked_conversation_sample(messages, column, text_in_column(row, "system", optional=True), row.get("tools"))


def parse(row: Row) -> UntokenizedSample:
    """Speakers become roles, values become contents."""
    return sample_of_turns(row, "conversations")


FORMATS.register("conversations", RowFormat("conversations", ("conversations",), parse, ("tools", "system"), rank=2))
