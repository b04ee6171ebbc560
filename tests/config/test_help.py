"""The help page holds every option of its task and fits the width; the schema accepts what the loader accepts.

Covers: megaswift/config/schema.py.
"""

import json

import pytest

from megaswift.config.help import task_help
from megaswift.config.schema import config_json_schema
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("task", ["sft", "pt", "grpo"])
def test_page(task: str, width: int) -> None:
    page = task_help(task, width)
    assert max(map(len, page.splitlines())) <= width
    for o in OPTIONS.values():
        for name in o.names:
            assert (f"--{name} " in page.replace("\n", " ")) == o.belongs_to(task), name
    for words in (
        "--max_length 2048 tokens",
        "--per_device_train_batch_size 1 sample",
        "--eval_steps STEPS",
        "--learning_rate 1e-05",
        "also --tp --tensor_model_parallel_size",
    ):
        assert words in page
    assert "1 samples" not in page


def test_schema_is_complete_and_json() -> None:
    schema = json.loads(json.dumps(config_json_schema()))
    assert set(schema["properties"]) >= {*NAMES, *SECTIONS, "task"}
    assert set(schema["$defs"]["section"]["properties"]) == {*NAMES, "rlhf_type"}
    assert schema["$defs"]["learning_rate"] == {
        "description": "Peak learning rate; unset with adapters: 1e-4",
        "type": ["number", "string", "null"],
        "pattern": "^([Nn]one|NONE|[Nn]ull|NULL)?$",
        "exclusiveMinimum": 0,
        "default": 1e-5,
    }
    assert schema["$defs"]["max_steps"]["type"] == ["integer", "string", "null"]


def test_schema_agrees_with_the_loader() -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(config_json_schema())
    from megaswift.config import SwiftConfig

    assert validator.is_valid(SwiftConfig(dataset=["a"], columns={"a": "b"}, dtype="bf16").to_dict())
    assert validator.is_valid(
        {"lr": 1e-5, "parallel": {"tp": 2}, "model": "DIR", "dataset": "d.jsonl", "dtype": "bf16"}
    )
    for wrong in ({"lr": 0}, {"nosuch": 1}, {"parallel": {"tp": "x"}}, {"torch_dtype": "int8"}, {"max_steps": 1.5}):
        assert not validator.is_valid(wrong), wrong
