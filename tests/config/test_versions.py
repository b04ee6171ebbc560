"""Versions of an output folder by name and number; which runs write to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.base.versions import run_folder, versions
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.inference.options.run_files import adapter_folder

DATE = "20261128-181500"


def test_versions_are_ordered_by_number(tmp_path: Path) -> None:
    for name in (f"v10-{DATE}", f"v9-{DATE}", f"v2-{DATE}", "v3-old", "jobs", f"v1-{DATE}-copy"):
        (tmp_path / name).mkdir()
    (tmp_path / f"v11-{DATE}").write_text("a file")
    assert [path.name for path in versions(tmp_path)] == [f"v2-{DATE}", f"v9-{DATE}", f"v10-{DATE}"]
    assert versions(tmp_path / "missing") == []


def test_an_output_folder_stands_for_its_newest_version_with_the_part(tmp_path: Path) -> None:
    for number, part in ((0, "hf"), (1, "adapter"), (2, "checkpoints")):
        (tmp_path / f"v{number}-{DATE}" / part).mkdir(parents=True)
    assert run_folder(tmp_path, ["hf"]).name == f"v0-{DATE}"
    assert run_folder(tmp_path, ["hf", "adapter"]).name == f"v1-{DATE}"
    assert run_folder(tmp_path, ["report.html"]) == tmp_path
    (tmp_path / "hf").mkdir()
    assert run_folder(tmp_path, ["hf"]) == tmp_path, "a run in the folder itself"


def test_adapters_of_the_newest_version_are_taken(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = tmp_path / f"v{number}-{DATE}" / "adapter"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    assert adapter_folder(str(tmp_path)) == str(folder)


@pytest.mark.parametrize(
    ("words", "adds"),
    [
        ("", True),
        ("--output_dir out", False),
        ("--output_dir output", False),
        ("--save out", False),
        ("--add_version false", False),
        ("--output_dir out --add_version true", True),
        ("--overwrite_output_dir true", False),
        ("--resume_from_checkpoint latest", True),
    ],
)
def test_a_run_without_a_typed_folder_writes_to_a_version(words: str, adds: bool) -> None:
    assert load_config("sft", words.split(), environ={}).checkpoint.add_version is adds


def test_a_folder_in_a_file_counts_as_typed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\n")
    assert load_config("sft", [str(file)], environ={}).checkpoint.add_version is False
    file.write_text("learning_rate: 1e-5\n")
    assert load_config("sft", [str(file)], environ={}).checkpoint.add_version is True


def test_python_decides_as_the_command_line_does() -> None:
    config = SwiftConfig(task="sft")
    assert config.checkpoint.add_version is True
    assert config.replace(learning_rate=1e-4).checkpoint.add_version is True
    assert config.replace(output_dir="out").checkpoint.add_version is False
    assert SwiftConfig(task="sft", output_dir="out", add_version=True).replace(seed=7).checkpoint.add_version is True
    assert SwiftConfig.from_dict(config.to_dict()).checkpoint.add_version is True, "what `megaswift config` prints"


def test_a_version_has_nothing_to_overwrite() -> None:
    with pytest.raises(ConfigError, match="contains no run to replace"):
        SwiftConfig(task="sft", add_version=True, overwrite_output_dir=True)
