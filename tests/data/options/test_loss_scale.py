"""`--loss_scale`: its names, files and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.data.options.loss_scale import NAMED, LossWeightTable, parse_loss_scale
from megaswift.errors import ConfigError


def test_turns_and_tables() -> None:
    assert parse_loss_scale("default").turns == "default" and parse_loss_scale("default").tables == ()
    hermes = LossWeightTable({}, {"<tool_call>.+?</tool_call>": 2.0}, {})
    assert parse_loss_scale("hermes") == parse_loss_scale("default+hermes")
    assert parse_loss_scale("hermes").tables == (hermes,)
    both = parse_loss_scale("last_round+hermes+ignore_empty_think")
    assert both.turns == "last_round" and both.tables[0] == hermes and set(both.tables[1].patterns.values()) == {0.0}
    assert parse_loss_scale("react").tables[0].keywords["Observation:"] == (2.0, 0.0)
    assert set(parse_loss_scale("agentflan").tables[0].queries.values()) == {3.0}


@pytest.mark.parametrize("name", NAMED)
def test_every_named_table_is_read(name: str) -> None:
    (table,) = parse_loss_scale(name).tables
    assert table.weights and table.weights <= {0.0, 1.0, 2.0, 3.0}


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"Answer:": [1, 4], "[0-9]+": [0.5]}))
    scale = parse_loss_scale(f"last_round+{file}")
    assert scale.turns == "last_round"
    assert scale.tables == (LossWeightTable({"Answer:": (1.0, 4.0)}, {"[0-9]+": 0.5}, {}),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "contains no weights"),
        ({"a": [1, 2, 3]}, "not one or two weights"),
        ({"a": [-1]}, "not one or two weights"),
        ({"a": ["2"]}, "not one or two weights"),
        ({"(": [1]}, "not a regular expression"),
        ({"response": {"a": [1, 2]}, "query": [3]}, "no object of weights"),
        ([], "JSON object"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, content: Any, said: str) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        parse_loss_scale(str(file))


@pytest.mark.parametrize(
    ("task", "value", "said"),
    [
        ("sft", "hermez", "there is no loss scale 'hermez'"),
        ("sft", "default+last_round", "there is no loss scale 'last_round'"),
        ("sft", "none.json", "cannot be read"),
        ("sft", "hermes+", "there is no loss scale ''"),
        ("dpo", "all", "carries no loss in dpo"),
        ("orpo", "hermes", "no effect in orpo"),
        ("grpo", "last_round", "no effect in grpo"),
    ],
)
def test_mistakes_on_the_command_line(task: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(task, ["--loss_scale", value], environ={})


def test_accepted_in_preference_tasks() -> None:
    for task in ("dpo", "cpo", "simpo", "kto"):
        words = ["--loss_scale", "last_round+ignore_empty_think"]
        assert load_config(task, words, environ={}).data.loss_scale == words[1]
