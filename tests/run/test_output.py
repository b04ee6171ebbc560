"""The output directory: another run is refused, nothing is lost, and what is ours is told from what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.run.lock import RunLock
from megaswift.run.output import OutputFolder, output_folder_problems, prepare_output_folder
from megaswift.version import __version__


def config(root: Path, **options: object) -> SwiftConfig:
    return SwiftConfig(task="sft", model="m", dataset="d.jsonl", output_dir=str(root), **options)


def old_run(root: Path) -> Path:
    prepare_output_folder(config(root))
    (root / "metrics.jsonl").write_text('{"step": 1}\n')
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    (root / "notes.txt").write_text("mine")
    return root


def test_a_new_folder_and_a_folder_of_other_things_are_fine(tmp_path: Path) -> None:
    assert output_folder_problems(config(tmp_path / "new" / "deep")) == []
    (tmp_path / "notes.txt").write_text("mine")
    assert output_folder_problems(config(tmp_path)) == []


def test_another_run_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    problems = output_folder_problems(config(old_run(tmp_path / "out")))
    assert len(problems) == 1
    assert problems[0].rule == "contains another run (config.yaml, metrics.jsonl, hf, train.log)"
    assert "--resume_from_checkpoint latest" in problems[0].fix and "--overwrite_output_dir" in problems[0].fix


@pytest.mark.parametrize(("node", "job", "free"), [(1, "a", True), (0, "a", False), (1, "b", False), (1, "", False)])
def test_a_node_that_joins_its_run_again_finds_the_lock_taken(
    node: int, job: str, free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGASWIFT_JOB", "a")
    several = {"nnodes": 2, "node_rank": node, "master_addr": "h", "resume_from_checkpoint": "latest"}
    lock = RunLock(tmp_path / "out")
    prepare_output_folder(config(tmp_path / "out", **several), lock)
    monkeypatch.setenv("MEGASWIFT_JOB", job)
    found = output_folder_problems(config(tmp_path / "out", **several))
    lock.release()
    assert free == (not found) and all("a run is writing to this folder" in problem.rule for problem in found)


def test_resume_is_let_in(tmp_path: Path) -> None:
    assert output_folder_problems(config(old_run(tmp_path / "out"), resume_from_checkpoint="latest")) == []


def test_a_checkpoint_of_elsewhere_does_not_open_an_occupied_folder(tmp_path: Path) -> None:
    from tests.trainers.test_checkpoints import CheckpointStore, save

    folder = save(CheckpointStore(tmp_path / "other" / "checkpoints"), 3)
    own = save(CheckpointStore(old_run(tmp_path / "out") / "checkpoints"), 5)
    assert (
        "contains another run"
        in output_folder_problems(config(tmp_path / "out", resume_from_checkpoint=str(folder)))[0].rule
    )
    assert output_folder_problems(config(tmp_path / "out", resume_from_checkpoint=str(own))) == []
    assert output_folder_problems(config(tmp_path / "fresh", resume_from_checkpoint=str(folder))) == []
    assert (
        "is not a folder"
        in output_folder_problems(config(tmp_path / "fresh", resume_from_checkpoint=str(tmp_path / "none")))[0].rule
    )


def test_overwrite_moves_the_old_run_aside_and_touches_nothing_else(tmp_path: Path) -> None:
    out = old_run(tmp_path / "out")
    for number in (1, 2):
        assert output_folder_problems(config(out, overwrite_output_dir=True)) == []
        prepare_output_folder(config(out, overwrite_output_dir=True))
        assert (out / "replaced" / str(number) / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
        assert not (out / "metrics.jsonl").exists() and (out / "notes.txt").read_text() == "mine"
        (out / "metrics.jsonl").write_text(f'{{"step": {number + 1}}}\n')
    assert (out / "replaced" / "1" / "hf" / "config.json").exists()


def test_a_model_inside_the_run_to_be_replaced_is_refused(tmp_path: Path) -> None:
    out = old_run(tmp_path / "out")
    made = SwiftConfig(task="sft", model=str(out / "hf"), dataset="d", output_dir=str(out), overwrite_output_dir=True)
    assert "would be replaced" in output_folder_problems(made)[0].rule


def test_a_start_that_failed_before_its_first_step_blocks_nothing(tmp_path: Path) -> None:
    prepare_output_folder(config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints").mkdir()
    assert output_folder_problems(config(tmp_path)) == []


def test_a_config_yaml_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learning_rate: 1e-5\n")
    assert "config.yaml" in output_folder_problems(config(tmp_path))[0].rule


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("x")
    assert "is a file" in output_folder_problems(config(tmp_path / "out" / below))[0].rule


def test_config_yaml_repeats_the_run(tmp_path: Path) -> None:
    made = config(tmp_path, learning_rate=3e-5, tp=2, max_steps=7, columns={"a": "query"})
    prepare_output_folder(made)
    assert load_config("sft", [str(OutputFolder(tmp_path).config)]).to_dict() == made.to_dict()
    first = OutputFolder(tmp_path).config.read_text().partition("\n")[0]
    assert first == f"# The resolved configuration of this run, written by megaswift {__version__}."
    assert not [
        line for line in load_config("sft", [str(OutputFolder(tmp_path).config)]).notices if "written by" in line
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "train.log", "config.yaml", "checkpoints", "run.lock"])
@pytest.mark.parametrize("kind", ["pipe", "ring", "/dev/zero"])
def test_what_is_neither_file_nor_folder_is_named(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if kind == "ring" else kind)
    said = "ring of" if kind == "ring" else "neither a file"
    for more in ({}, {"resume_from_checkpoint": "latest"}, {"overwrite_output_dir": True}):
        found = output_folder_problems(config(path.parent, **more))
        assert found and found[0].what == str(path) and said in found[0].rule
