"""The schema for editors: every shipped configuration as a reader of YAML 1.2 has it, and what the loader takes too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megaswift.config.schema import config_json_schema
from megaswift.config.sections import OPTIONS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*/*.yaml"))


class Core(yaml.SafeLoader):
    """YAML 1.2's core schema (chapter 10.3.2), as editors read files: `yes` and `on` are text, `1e-5` is a number."""


Core.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("null", r"|~|null|Null|NULL", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
):  # fmt: skip
    Core.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def read(text: str) -> Any:
    return Core(text).get_single_data()


VALIDATOR = jsonschema.Draft202012Validator(config_json_schema())


def wrong(text: str) -> list[str]:
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message[:80]}" for e in VALIDATOR.iter_errors(read(text))]


def test_the_reader_is_of_version_1_2() -> None:
    assert read("[yes, on, no, true, 1e-5, 1.5E3, 0o17, 12, ~, 1:30, 0x1F]") == [
        "yes", "on", "no", True, 1e-5, 1500.0, "0o17" if read("0o17") == "0o17" else 15, 12, None, "1:30", 31
    ]  # fmt: skip
    assert yaml.safe_load("[yes, 1e-5]") == [True, "1e-5"]  # 1.1, PyYAML's own


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_shipped_configurations(path: Path) -> None:
    assert wrong(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "rlhf_type: dpo\n",
        "train_type: grpo\nuse_vllm: true\n",
        "shuffle: yes\npacking: on\nstrict: off\n",
        "lr: 1e-5\nwarmup_ratio: 5.e-2\nmax_steps: 1e3\n",
        "num_train_epochs: none\nmax_steps: -1\neval_iters: -1\n",
        "gradient_checkpointing: true\n",
        "report_to: none\ndataset: a.jsonl\n",
        "report_to: [wandb, tensorboard]\n",
        "dtype: bf16\nrlhf:\n  rlhf_type: dpo\nparallel:\n",
        "model: DIR\nparallel: {tp: 2}\n",
        "columns: {q: query}\ndeepspeed: zero2\n",
        "task: grpo\nuse_vllm: true\nvllm_mode: colocate\n",
    ],
)
def test_what_the_loader_takes(text: str) -> None:
    assert wrong(text) == []


@pytest.mark.parametrize(
    "text",
    ["lr: 0\n", "lr: fast\n", "shuffle: maybe\n", "max_steps: 1.5\n", "max_steps: -2\n", "tp: 0\n", "rlhf_type: xpo\n",
     "dtype: int8\n", "nosuch: 1\n", "parallel: {nosuch: 1}\n", "seed: -1\n", "packing: 3\n"],
)  # fmt: skip
def test_what_is_wrong_is_marked(text: str) -> None:
    assert wrong(text), text


def test_every_default_is_valid() -> None:
    """An editor fills it in."""
    for name, option in OPTIONS.items():
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        assert VALIDATOR.is_valid({name: default}), name
