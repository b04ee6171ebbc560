"""What a message's fields say of its loss in each dialect, and names of the user's file in messages."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.data.formats import parse_sample
from megaswift.data.untokenized_sample import RowError

Q = {"role": "user", "content": "q"}
NAMES = ("weight", "loss_weight", "train", "training")


def answer(text: str = "a", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, False, True, None])
@pytest.mark.parametrize("role", ["assistant", "tool_call"])
def test_weights_of_other_toolkits_are_loss_flags(name: str, value: Any, role: str) -> None:
    first = answer() if role == "assistant" else {"role": role, "content": '{"name": "f", "arguments": {}}'}
    result = [] if role == "assistant" else [{"role": "tool", "content": "r"}]
    rows = [
        {"messages": [Q, {**first, key: value if key == name else flag}, *result, Q, answer("b")]}
        for key, flag in ((name, value), ("loss", None if value is None else bool(value)))
    ]
    assert parse_sample(rows[0], "sft") == parse_sample(rows[1], "sft")


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_other_formats(name: str) -> None:
    turns = [{"from": "human", "value": "q", name: 0}, {"from": "gpt", "value": "a", name: 0}]
    assert parse_sample({"conversations": turns}, "sft").loss == (False, False)
    rounds = [{"human": "q", "assistant": "a", name: 0}, {"human": "q", "assistant": "b"}]
    sample = parse_sample({"conversation": rounds}, "sft")
    assert sample.loss == (None, False, None, None)
    assert all(set(m) == {"role", "content"} for m in sample.messages)


def test_a_message_is_excluded_if_any_field_says_so() -> None:
    assert parse_sample({"messages": [Q, answer(loss=True, weight=0)]}, "sft").loss == (None, False)
    assert parse_sample({"messages": [Q, answer(train=False, loss_scale=1)]}, "sft").loss == (None, False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.5, 2, -1, "0", "true", [], {}])
def test_weights_that_are_no_flags_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RowError) as e:
        parse_sample({"messages": [Q, answer(**{name: value})]}, "sft")
    assert e.value.column == f"messages[1].{name}" and e.value.expected == "0, 1, false or true"


def test_weights_where_nothing_can_be_trained_on_are_refused() -> None:
    with pytest.raises(RowError) as e:
        parse_sample({"messages": [Q | {"weight": 1}, answer()]}, "sft")
    assert e.value.column == "messages[0].weight" and "user message" in e.value.found
    with pytest.raises(RowError) as e:
        parse_sample(
            {"messages": [Q, answer(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])]}, "sft"
        )
    assert e.value.column == "messages[1].train_detail"


CONTROL = ["\x1b]0;title\x07", "\nmegaswift: fake line", "\r", "\x9b2J", "\u2028", "\u202e"]


@pytest.mark.parametrize("text", CONTROL)
def test_control_characters_of_a_row_do_not_reach_the_terminal(text: str) -> None:
    errors = []
    for row in ({f"a{text}": "x"}, {"messages": [Q, {"role": f"r{text}", "content": "c"}]}):
        with pytest.raises(RowError) as e:
            parse_sample(row, "sft")
        errors += [e.value.where, e.value.found, e.value.fix]
    assert not any(text in one for one in errors)
