"""Rows of a Python program become a file: the same rows, the same file; what JSON cannot hold is refused with its
place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.sources.files import FilePart
from megaswift.data.sources.in_memory import dataset_option_paths
from megaswift.errors import ConfigError, DataError
from tests.data.makers import chat, config, jsonl, tokenizer

ROWS = [chat("hello", "world"), chat("日本語", "🙂"), {"messages": [], "number": 1.5, "none": None}]


def read(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_rows_are_one_file_whatever_holds_them(tmp_path: Path) -> None:
    path = dataset_option_paths(ROWS, "dataset", str(tmp_path))
    assert read(path) == ROWS and [p.name for p in (tmp_path / "rows").iterdir()] == [Path(path).name]
    same = datasets.Dataset.from_list(ROWS[:2])
    assert read(dataset_option_paths(same, "dataset", str(tmp_path))) == ROWS[:2]
    assert dataset_option_paths(tuple(ROWS[:2]), "dataset", str(tmp_path)) == dataset_option_paths(
        same, "dataset", str(tmp_path)
    )
    assert dataset_option_paths(ROWS[:1], "dataset", str(tmp_path)) != path


def tool(name: str, /, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


SEVERAL_TOOLS = [
    {
        "messages": [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("add", {"a": 1}), call("city", {"name": "Rome"})],
            },
            {"role": "tool", "content": "r", "name": "add", "tool_call_id": "c"},
            {"role": "assistant", "content": "world", "reasoning_content": "think", "weight": 1.0},
        ],
        "tools": [
            tool("add", a={"type": "integer", "minimum": 0}),
            tool("city", b={"type": "string", "enum": ["Rome"]}),
        ],
    },
    {"messages": [*chat("q", "a")["messages"], {"role": "user", "content": "x"}], "tools": None},
]


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
def test_arrow_s_nulls_change_no_token(name: str, tmp_path: Path) -> None:
    """Structs of a table have the keys of all rows: nulls for those that a row does not have."""
    dataset = datasets.Dataset.from_list(SEVERAL_TOOLS)
    assert dataset[0]["tools"][0]["function"]["parameters"]["properties"]["b"] is None
    dataset.to_parquet(tmp_path / "d.parquet")
    paths = [
        jsonl(tmp_path / "d.jsonl", SEVERAL_TOOLS),
        str(tmp_path / "d.parquet"),
        str(dataset_option_paths(dataset, "dataset", str(tmp_path))),
    ]
    tokens = [
        [(ids.tolist(), mask.tolist()) for ids, mask in encoder.tokenize([encoder.render(row) for row in rows(path)])]
        for path in paths
        for encoder in [RowEncoder(encode_spec(config(tmp_path, path).data, tokenizer("qwen", name), "sft"))]
    ]
    assert tokens[0] == tokens[1] == tokens[2] and "null" not in tokenizer("qwen").decode(tokens[0][0][0])


def rows(path: str) -> list[Any]:
    return [located.row for located in FilePart(path, Path(path).suffix[1:], 0, 1 << 62).rows()]


def test_paths_stay_paths(tmp_path: Path) -> None:
    assert dataset_option_paths("a.jsonl#5", "dataset", None) == "a.jsonl#5"
    assert dataset_option_paths(tmp_path / "a", "dataset", None) == str(tmp_path / "a")
    mixed = dataset_option_paths(["a", tmp_path, datasets.Dataset.from_list(ROWS[:1])], "dataset", str(tmp_path))
    assert mixed[:2] == ["a", str(tmp_path)] and read(mixed[2]) == ROWS[:1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "dataset: is of type int.*try: give a path, a list of paths, a list of dictionaries or a datasets.Dataset"),
        ([], "dataset: is empty"),
        ([{"a": 1}, "b"], "elements of type dict, str"),
        (b"abc", "is of type bytes"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])}), "DatasetDict of train.*splits"),
        (datasets.Dataset.from_list(ROWS[:1]).to_iterable_dataset(), "IterableDataset, which has no length"),
        ([{"a": 1}, {"a": 1, "b": {1, 2}}], "dataset: row 1, column b: set cannot be represented in JSON"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_no_run_can_read(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        dataset_option_paths(given, "dataset", str(tmp_path))
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a file")
    with pytest.raises(DataError, match="--dataset_cache_dir .*: cannot be written"):
        dataset_option_paths(ROWS, "dataset", str(tmp_path))
