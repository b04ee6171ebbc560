"""Placeholders of self-cognition rows, up to the tokens."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.formats import UnknownFormat, recognize_format
from megaswift.data.sources.columns import fill_self_cognition_name_placeholders, rename_columns
from tests.data.makers import tokenizer

TEXTS = {"{{NAME}}": ("小黄", "Xiao Huang"), "{{AUTHOR}}": ("魔搭",)}


@pytest.mark.parametrize(
    ("row", "filled"),
    [
        ({"response": "I am {{NAME}} by {{AUTHOR}}.", "tag": "en"}, "I am Xiao Huang by 魔搭."),
        ({"response": "我是{{NAME}}。", "tag": "zh"}, "我是小黄。"),
        ({"response": "{{NAME}}{{NAME}}"}, "Xiao HuangXiao Huang"),
        ({"response": "I am {{name}} by {{author}}."}, "I am Xiao Huang by 魔搭."),
        ({"response": "nothing to fill in {NAME}"}, "nothing to fill in {NAME}"),
    ],
)
def test_texts(row: dict[str, Any], filled: str) -> None:
    assert fill_self_cognition_name_placeholders(row, TEXTS)["response"] == filled


@pytest.mark.parametrize(
    ("task", "row", "proposed"),
    [
        ("sft", {"Question": "a", "Best Answer": "b", "id": 3}, "Question=query 'Best Answer=response' (not read: id)"),
        ("sft", {"id": "x", "user_message": "a", "bot_reply": "b"}, "user_message=query bot_reply=response (not read: "
         "id)"),
        ("sft", {"problem": "a", "generated_solution": "b", "n": 1}, "problem=query generated_solution=response (not "
         "read: n)"),
        ("sft", {"src": "a", "tgt": "b"}, "src=query tgt=response"),
        ("sft", {"first": "a", "second": "b"}, ""),
        ("sft", {"all_turns": [{"role": "user", "content": "a"}]}, "all_turns=messages"),
        ("sft", {"question": 3, "answer": 4}, ""),
        ("pt", {"page_text": "a", "url": "b"}, "page_text=text (not read: url)"),
        ("dpo", {"prompt": "a", "winner": "b", "loser": "c"}, "winner=chosen loser=rejected"),
        ("dpo", {"question": "a", "good_answer": "b", "bad_answer": "c"}, "question=prompt good_answer=chosen "
         "bad_answer=rejected"),
        ("kto", {"prompt": "a", "completion": "b", "thumbs_up": True}, "prompt=query completion=response "
         "thumbs_up=label"),
        ("grpo", {"math_problem": "a", "answer": "b"}, "math_problem=prompt (for reward functions: answer)"),
    ],
)  # fmt: skip
def test_columns_proposed_from_the_header_are_read(task: str, row: dict[str, Any], proposed: str) -> None:
    """What is proposed is an option that makes the row one of a known format."""
    with pytest.raises(UnknownFormat) as caught:
        recognize_format(row, task)
    assert caught.value.fix == (f"--columns {proposed}" if proposed else "")
    pairs = [word.split("=") for word in shlex.split(proposed.partition(" (")[0])]
    if pairs:
        assert task in recognize_format(rename_columns(row, dict(pairs)), task).tasks


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
