"""`conversation` (or `conversations`): [{"human", "assistant"}], one object a round."""

from __future__ import annotations

from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import (
    LOSS_FIELDS,
    RowError,
    UntokenizedSample,
    checked_conversation_sample,
    decode_json_cell,
    describe_value,
    text_in_column,
)


def _rounds(row: Row, column: str) -> Any:
    return decode_json_cell(row[column], column, "a list of rounds")


def _pairs(row: Row) -> bool:
    value = row.get("conversations")
    if isinstance(value, str):
        return value.lstrip().startswith("[") and '"human"' in value and '"from"' not in value
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "human" in value[0]


def _parse(row: Row, column: str) -> UntokenizedSample:
    rounds = _rounds(row, column)
    if not isinstance(rounds, list):
        raise RowError(column, describe_value(rounds), "a list of rounds")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(rounds):
        if (
            not isinstance(item, dict)
            or not isinstance(item.get("human"), str)
            or not isinstance(item.get("assistant"), str)
        ):
            raise RowError(f"{column}[{i}]", describe_value(item), 'an object {"human": string, "assistant": string}')
        loss = {name: item[name] for name in LOSS_FIELDS if name in item}
        answer = {"role": "assistant", "content": item["assistant"], **loss}
        messages += [{"role": "user", "content": item["human"]}, answer]
    return checked_conversation_sample(messages, column, text_in_column(row, "system", optional=True), row.get("tools"))


def parse(row: Row) -> UntokenizedSample:
    """Rounds under `conversation`."""
    return _parse(row, "conversation")


def parse_conversations_column(row: Row) -> UntokenizedSample:
    """Rounds under `conversations`."""
    return _parse(row, "conversations")


FORMATS.register("sharegpt", RowFormat("sharegpt", ("conversation",), parse, ("tools", "system"), rank=1))
FORMATS.register(
    "sharegpt (conversations)",
    RowFormat("sharegpt", ("conversations",), parse_conversations_column, ("tools", "system"), detect=_pairs, rank=1),
)
