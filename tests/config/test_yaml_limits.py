"""Numbers of YAML files are decimal, and aliases cannot multiply values without bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.engine.options.tp_overlap_file import read_tp_comm_overlap_cfg
from megaswift.engine.options.zero_file import read_deepspeed_json
from megaswift.errors import ConfigError
from megaswift.options.yaml_limits import TooManyValuesError, read_yaml

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", "010"),
        ("1:30", "1:30"),
        ("24:00:00", "24:00:00"),
        ("0x10", "0x10"),
        ("0b11", "0b11"),
        ("1:30.5", "1:30.5"),
        ("1_000", 1000),
        ("-7", -7),
        ("0", 0),
        ("1.50", 1.5),
        ("2.5e-3", 0.0025),
        ("true", True),
        ("null", None),
    ],
)
def test_numbers_are_decimal(text: str, value: object) -> None:
    assert read_yaml(f"a: {text}") == {"a": value}


@pytest.mark.parametrize(
    ("line", "section", "name", "value"),
    [("max_steps: 010", "train", "max_steps", 10), ("learning_rate: 01.5e-5", "optim", "learning_rate", 1.5e-5)],
)
def test_a_run_file_reads_as_the_command_line(line: str, section: str, name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"dataset: d.jsonl\n{line}\n")
    assert getattr(getattr(load_config("sft", [str(tmp_path / "r.yaml")], environ={}), section), name) == value


@pytest.mark.parametrize("value", ["1:30", "0x10", "0b11", "0o17", "1:30:00"])
def test_other_bases_are_refused_in_a_run_file(value: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"dataset: d.jsonl\nmax_steps: {value}\n")
    with pytest.raises(ConfigError, match=rf"max_steps: {value}: must be a number"):
        load_config("sft", [str(tmp_path / "r.yaml")], environ={})


def test_aliases_are_counted_as_if_written_out(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMB)
    with pytest.raises(TooManyValuesError):
        read_yaml(BOMB)
    for read in (read_deepspeed_json, read_tp_comm_overlap_cfg):
        with pytest.raises(ConfigError, match="values, with its aliases expanded"):
            read(str(file))
    with pytest.raises(ConfigError, match="values, with its aliases expanded"):
        load_config("sft", [str(file)], environ={})
