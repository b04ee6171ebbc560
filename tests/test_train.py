"""Entry files of other toolkits: `main.py --mode train --algorithm`, `megaswift train`, ms-swift's paths."""

from __future__ import annotations

import runpy
import sys
from itertools import combinations
from pathlib import Path

import pytest

from megaswift import train
from megaswift.cli import main
from megaswift.commands import training
from tests.sources import ROOT

FILES = sorted(p.relative_to(ROOT) for p in (ROOT / "megaswift" / "cli").rglob("*.py") if not p.name.startswith("__"))
ENTRIES = [*map(str, FILES), "main.py", "megaswift/train.py", "megaswift/infer.py"]


def first_line_of_help(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("file", ENTRIES)
def test_an_entry_file_is_its_command(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As python starts it: with the folder of the file first on the path, and without its package."""
    folder = str((ROOT / file).parent)
    monkeypatch.setattr(sys, "argv", [file, "--help"])
    monkeypatch.setattr(sys, "path", [folder, *(p for p in sys.path if Path(p or ".").resolve() != ROOT), str(ROOT)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    assert ended.value.code == 0
    command = {"main.py": "train", "megaswift/cli/main.py": ""}.get(file, Path(file).stem)
    assert first_line_of_help(capsys).startswith(f"megaswift {command}")
    assert file == "main.py" or folder not in sys.path


def test_entry_files_below_megatron_are_thin() -> None:
    """Any two of them have at most five lines in common, blank lines aside."""
    texts = [(ROOT / file).read_text().splitlines() for file in FILES if file.parent.name == "_megatron"]
    lines = [{line for line in text if line.strip()} for text in texts]
    assert len(lines) == 4 and max(len(a & b) for a, b in combinations(lines, 2)) <= 5


@pytest.mark.parametrize(("module", "command"), [("megaswift.cli._megatron.pt", "pt"), ("megaswift.cli", "")])
def test_an_entry_file_as_a_module(
    module: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0 and first_line_of_help(capsys).startswith(f"megaswift {command}")


@pytest.mark.parametrize(
    ("words", "task"),
    [
        ("--mode train --algorithm dpo", "dpo"),
        ("--training_task GRPO", "grpo"),
        ("--rlhf_type orpo", "orpo"),
        ("", "sft"),
        ("--config {file}", "orpo"),
        ("--config {file} --algorithm orpo --local_rank -1", "orpo"),
    ],
)
def test_the_options_name_the_task(words: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("task: orpo\nmodel: m\n")
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(training, "main", lambda task, words: started.append((task, words)) or 0)
    typed = ["--model", "m", *words.format(file=tmp_path / "run.yaml").split()]
    assert main(["train", *typed]) == 0 and started == [(task, typed)]


@pytest.mark.parametrize("words", ["--model m --dataset d.jsonl --reward_funcs accuracy", "--model m --epsilon 0.1"])
def test_rlhf_without_a_type_says_only_that(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of a task have no effect in sft, but sft was not meant."""
    with pytest.raises(SystemExit) as ended:
        training.main("rlhf", words.split())
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "--rlhf_type: is missing" in told and told.count("\n  - ") == 1


@pytest.mark.parametrize("words", ["--train_type dpo", "--rlhf_type dpo", "--config {file}"])
def test_a_type_of_rlhf_in_any_form(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("rlhf_type: dpo\n")
    with pytest.raises(SystemExit):
        training.main("rlhf", words.format(file=tmp_path / "run.yaml").split())
    told = capsys.readouterr().err
    assert "--model: is missing" in told and "--rlhf_type" not in told


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--mode", "eval", "--model", "m"])
    assert ended.value.code == 2 and "use the command's name: megaswift infer" in capsys.readouterr().err
    assert train.main([]) == 2
