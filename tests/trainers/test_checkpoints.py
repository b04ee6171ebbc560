"""The folder of checkpoints: what counts as one, which is the latest, what rotation may delete.

Covers: megaswift/folders/saved_steps.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megaswift.errors import CheckpointError
from megaswift.folders.saved_steps import damaged_file_problems, steps_in_resume_order
from megaswift.trainers import checkpoints
from megaswift.trainers.checkpoints import CheckpointStore


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "engine").mkdir()
    (folder / "engine" / "a.bin").write_text(f"{text} of step {step}")
    (folder / "engine" / "b.bin").write_text("more")
    return store.finish(
        step,
        checkpoints.hash_files(folder, checkpoints.unhashed_files(folder, ())),
        {"data": {"position": step}},
    )


def test_a_checkpoint_holds_its_state_and_the_hash_of_every_file(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 3)
    manifest = checkpoints.load_manifest_or_none(folder)
    assert manifest is not None
    assert (
        manifest["step"] == 3 and manifest["data"] == {"position": 3} and abs(manifest["saved_at"] - time.time()) < 60
    )
    assert list(manifest["files"]) == ["engine/a.bin", "engine/b.bin"]
    by_sha256sum = "187897ce0afcf20b50ba2b37dca84a951b7046f29ed5ab94f010619f69d6e189"
    assert manifest["files"]["engine/b.bin"] == {"bytes": 4, "sha256": by_sha256sum}
    assert damaged_file_problems(folder) == []


def test_the_pointer_names_what_was_saved_last_even_when_its_step_is_lower(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 8)
    save(store, 4)
    assert store.latest() == tmp_path / "step-4"
    assert json.loads((tmp_path / "latest.json").read_text()) == {"step": 4, "directory": "step-4"}


def test_folders_without_a_whole_marker_are_ignored(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    forged = '{"format": 1, "step": 8, "saved_at": 9e9, "sha256": "0"}'
    for name, marker in (("step-4", None), ("step-6", '{"step": 6'), ("step-8", forged)):
        (tmp_path / name).mkdir()
        if marker:
            (tmp_path / name / checkpoints.MARKER).write_text(marker)
    store.begin(10)
    assert store.latest() == tmp_path / "step-2"
    assert [p.name for p in store.incomplete()] == ["step-10.saving", "step-4", "step-6", "step-8"]
    found, notes = checkpoints.select_resume_step("latest", tmp_path.parent)
    assert found is None and notes == []  # tmp_path is the folder of checkpoints, not an output directory


@pytest.mark.parametrize(
    "pointer", [None, "", "{}", '{"directory": "step-99"}', '{"directory": "../step-2"}', '{"directory": 7}', "[1]"]
)
def test_without_a_good_pointer_the_last_save_counts(tmp_path: Path, pointer: str | None) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    save(store, 4)
    (tmp_path / "latest.json").unlink()
    if pointer is not None:
        (tmp_path / "latest.json").write_text(pointer)
    assert store.latest() == tmp_path / "step-4"


def test_rotation_keeps_the_newest_and_never_deletes_the_pointed_at_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6, 8):
        save(store, step)
    (tmp_path / "latest.json").write_text('{"step": 2, "directory": "step-2"}')
    (tmp_path / "mine").mkdir()
    assert store.rotate(2) == [tmp_path / "step-4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "mine", "step-2", "step-6", "step-8"]
    assert store.rotate(None) == []


def test_rotation_does_not_count_a_step_found_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        save(store, step)
    (tmp_path / "step-4" / "engine" / "a.bin").write_text("weightS of step 4")
    assert damaged_file_problems(tmp_path / "step-4")
    save(store, 3)
    assert store.rotate(2) == []
    save(store, 5)
    assert store.rotate(2) == [tmp_path / "step-2"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-3", "step-4", "step-5"]


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume, rotation and `latest` go by the number of the step."""
    store, now = CheckpointStore(tmp_path), 2e9
    for step in range(1, 10):
        if step == 5:
            now -= 365 * 86400
        monkeypatch.setattr(time, "time", lambda at=now + step: at)
        save(store, step)
        store.rotate(3)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-7", "step-8", "step-9"]
    assert [p.name for p in steps_in_resume_order(tmp_path)] == ["step-9", "step-8", "step-7"]
    assert [s.step for s in store.complete()] == [7, 8, 9]
    (tmp_path / "latest.json").unlink()
    assert store.latest() == tmp_path / "step-9"


def test_a_run_that_went_back_to_an_earlier_step(tmp_path: Path) -> None:
    """Steps 6 and 8 are behind the pointer: the next one to try is the one before it, and rotation keeps it."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6, 8, 3, 5):
        save(store, step)
        store.rotate(2 if step in (3, 5) else None)
    assert [p.name for p in steps_in_resume_order(tmp_path)] == ["step-5", "step-3", "step-8", "step-6"]


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 4, "old")
    folder = save(store, 4, "new")
    assert (folder / "engine" / "a.bin").read_text() == "new of step 4"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "step-4"]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: p.write_bytes(b"weightS of step 3"), "content changed"),
        (lambda p: p.write_bytes(b"short"), "has 5 bytes; the manifest has 17"),
        (lambda p: p.unlink(), "is missing"),
    ],
)
def test_a_file_that_changed_since_is_named(tmp_path: Path, harm, message: str) -> None:  # noqa: ANN001
    folder = save(CheckpointStore(tmp_path), 3)
    harm(folder / "engine" / "a.bin")
    problems = damaged_file_problems(folder)
    assert len(problems) == 1 and "a.bin" in problems[0].what and message in problems[0].rule


def test_a_checkpoint_is_found_by_its_folder_its_run_or_latest(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path / "run" / "checkpoints"), 3)
    for wanted in (folder, tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert checkpoints.select_resume_step(str(wanted), tmp_path / "other") == (folder, [])
    assert checkpoints.select_resume_step("latest", tmp_path / "run") == (folder, [])
    assert checkpoints.select_resume_step("latest", tmp_path / "other") == (None, [])
    for named in (tmp_path / "run/checkpoints/latest", tmp_path / "run/latest"):
        assert checkpoints.select_resume_step(str(named), tmp_path / "other") == (folder, [])
    with pytest.raises(CheckpointError, match="try: use --resume_from_checkpoint latest, the newest"):
        checkpoints.select_resume_step(str(tmp_path / "nowhere/checkpoints/latest"), tmp_path)


def test_the_run_s_own_folder_is_its_newest_checkpoint(tmp_path: Path) -> None:
    """`--save OUT --load OUT` of a job that is started again and again: nothing at first, then the newest."""
    run = tmp_path / "run"
    for wanted in (run, run / "checkpoints", tmp_path / "other" / ".." / "run"):
        assert checkpoints.select_resume_step(str(wanted), run) == (None, [])
        assert checkpoints.names_newest_of_run(str(wanted), run)
    folder = save(CheckpointStore(run / "checkpoints"), 3)
    assert checkpoints.select_resume_step(str(run), run) == (folder, [])
    assert not checkpoints.names_newest_of_run(str(folder), run)
    assert not checkpoints.names_newest_of_run(None, run)


def test_an_interrupted_save_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = save(store, 3)
    store.begin(5)
    found, notes = checkpoints.select_resume_step("latest", tmp_path)
    assert found == folder and len(notes) == 1 and "step-5.saving" in notes[0]
    with pytest.raises(CheckpointError, match=r"no complete manifest(.|\n)*one of .*step-3"):
        checkpoints.select_resume_step(str(store.saving(5)), tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a folder(.|\n)*step-3"):
        checkpoints.select_resume_step(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a folder(.|\n)*one of .*step-3"):  # of the run that was named
        checkpoints.select_resume_step(str(tmp_path / "checkpoints/step-2"), tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"did you mean latest\?"):
        checkpoints.select_resume_step("lastest", tmp_path)
