"""Placeholders of self-cognition rows, up to the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.data.columns import fill_self_cognition_name_placeholders
from megaswift.data.encode_rows import RowEncoder, encode_spec
from tests.data.makers import tokenizer

TEXTS = {"{{NAME}}": ("小黄", "Xiao Huang"), "{{AUTHOR}}": ("魔搭",)}


@pytest.mark.parametrize(
    ("row", "filled"),
    [
        ({"response": "I am {{NAME}} by {{AUTHOR}}.", "tag": "en"}, "I am Xiao Huang by 魔搭."),
        ({"response": "我是{{NAME}}。", "tag": "zh"}, "我是小黄。"),
        ({"response": "{{NAME}}{{NAME}}"}, "Xiao HuangXiao Huang"),
        ({"response": "nothing to fill in {NAME}"}, "nothing to fill in {NAME}"),
    ],
)
def test_texts(row: dict[str, Any], filled: str) -> None:
    assert fill_self_cognition_name_placeholders(row, TEXTS)["response"] == filled


def test_values_within_a_row() -> None:
    row = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "{{NAME}}"}], "n": 3}
    filled = fill_self_cognition_name_placeholders({**row, "tag": "zh"}, TEXTS)
    assert filled["messages"][1]["content"] == "小黄" and filled["n"] == 3
    assert row["messages"][1]["content"] == "{{NAME}}", "the row itself is not changed"


def test_the_options_reach_the_text_and_the_cache_s_key() -> None:
    tokens = tokenizer("qwen", "qwen3")
    row = {"query": "Who are you?", "response": "I am {{NAME}}, made by {{AUTHOR}}."}
    named = SwiftConfig(model_name=["Robin"], model_author=["Alex", "Sam"]).data
    spec = encode_spec(named, tokens, "sft")
    assert "I am Robin, made by Sam." in RowEncoder(spec).render(row).text
    plain = encode_spec(SwiftConfig().data, tokens, "sft")
    assert "I am {{NAME}}, made by" in RowEncoder(plain).render(row).text and plain != spec
