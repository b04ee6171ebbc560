"""Entries of LLaMA-Factory's dataset_info.json as files, hub IDs and columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.compat.scripts.commands import migrated_run
from megaswift.compat.scripts.migrated_run import MigratedRun
from megaswift.compat.scripts.toolkits import command_of_file
from megaswift.config.sections import TRAINING
from megaswift.options.files import read_config_file
from tests.compat.scripts.translated import loaded

INFO: dict[str, Any] = {
    "plain": {"file_name": "plain.json"},
    "renamed": {
        "file_name": "sub/renamed.json",
        "columns": {"prompt": "question", "query": "context", "response": "answer"},
        "num_samples": 5,
    },
    "turns": {
        "file_name": "turns.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "remote": {"hf_hub_url": "org/rows", "ms_hub_url": "other/rows"},
    "odd": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"role_tag": "who"}, "split": "train[:10]"},
    "other": {"file_name": "other.json", "columns": {"response": "question"}},
    "nothing": {"script_url": "x"},
    "qa": {"file_name": "qa.json", "columns": {"prompt": "input", "response": "output"}},
    "qa_too": {"file_name": "qa_too.json", "columns": {"prompt": "input", "response": "answer"}},
    "same": {"file_name": "same.json", "columns": {"prompt": "instruction", "query": "input", "response": "answer"}},
    "unlisted": {"file_name": "unlisted.json", "columns": {"prompt": "instruction", "response": "output"}},
}


def run_of(folder: Path, dataset: str, place: str = "data") -> MigratedRun:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/dataset_info.json").write_text(json.dumps(INFO))
    file = folder / "examples" / "train_sft.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        f"stage: sft\nmodel_name_or_path: m\nfinetuning_type: full\ndataset: {dataset}\ndataset_dir: {place}\n"
    )
    return migrated_run(command_of_file(read_config_file(str(file), TRAINING), file.name), file.parent)


def test_files_hub_ids_and_columns(tmp_path: Path) -> None:
    run = run_of(tmp_path, "plain,renamed,turns,remote")
    cfg, data = loaded(run, tmp_path), tmp_path / "data"
    assert [str(d) for d in cfg.data.dataset] == [
        str(data / "plain.json"),
        f"{data / 'sub/renamed.json'}#5",
        str(data / "turns.json"),
        "org/rows",
    ]
    assert cfg.data.columns == {"question": "instruction", "context": "input", "answer": "output"}
    assert not any("dataset" in line for line in run.open)


@pytest.mark.parametrize(
    ("dataset", "columns", "asked"),
    [
        ("qa", {"input": "instruction"}, None),
        ("qa,qa_too", {"input": "instruction", "answer": "output"}, None),
        ("qa,unlisted", {"input": "instruction"}, None),
        ("plain,qa", {}, "plain"),
        ("qa,plain", {}, "plain"),
        ("qa,remote", {}, "remote"),
        ("qa,same", {"answer": "output"}, "same"),
    ],
)
def test_a_column_is_renamed_only_where_no_other_data_set_has_it(
    dataset: str, columns: dict[str, str], asked: str | None, tmp_path: Path
) -> None:
    """--columns is one map for all data sets: with `input: instruction`, rows of `plain` would lose a column."""
    run = run_of(tmp_path, dataset)
    assert (loaded(run, tmp_path).data.columns or {}) == columns
    said = [line for line in run.open if line.startswith("dataset qa: column input: is not renamed to instruction")]
    assert len(said) == (asked is not None) and all(f"dataset {asked} has it too" in line for line in said)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("odd", ("dataset odd: split", "dataset odd: tags")),
        ("renamed,other", ("dataset other: column question: is another column",)),
        ("nothing", ("dataset nothing: has no file or hub ID in",)),
        ("unknown", ("dataset unknown: has no file or hub ID in",)),
    ],
)
def test_what_is_asked(dataset: str, said: tuple[str, ...], tmp_path: Path) -> None:
    text = "\n".join(run_of(tmp_path, dataset).open)
    assert all(part in text for part in said), text


def test_without_the_file(tmp_path: Path) -> None:
    text = "\n".join(run_of(tmp_path, "plain", "elsewhere").open)
    assert (
        "is an entry of LLaMA-Factory's dataset_info.json" in text
        and "elsewhere/dataset_info.json is not found" in text
    )
