"""Write-then-rename: what is under the name after success, after an exception, and beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.base import atomic_writes


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, cached: bool) -> None:
    path = tmp_path / "a.json"
    atomic_writes.write_atomically(path, "first", cached)
    with atomic_writes.atomic_file(path, cached) as fresh:
        fresh.write_text("second")
        assert path.read_text() == "first" and fresh.parent == tmp_path
    assert path.read_text() == "second" and names(tmp_path) == ["a.json"]
    atomic_writes.write_atomically(path, "ä".encode(), cached)
    assert path.read_text(encoding="utf-8") == "ä"


@pytest.mark.parametrize("cached", [False, True])
def test_after_an_exception_the_old_file_is_there_and_nothing_else(tmp_path: Path, cached: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("first")
    with pytest.raises(KeyboardInterrupt), atomic_writes.atomic_file(path, cached) as fresh:
        fresh.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "first" and names(tmp_path) == ["a.json"]


def test_writers_of_a_cached_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with (
        atomic_writes.atomic_file(path, cached=True) as one,
        atomic_writes.atomic_file(path, cached=True) as other,
    ):
        one.write_text("1")
        other.write_text("2")
        assert one != other
    assert path.read_text() == "1" and names(tmp_path) == ["a"]


def test_the_file_is_flushed_before_its_rename_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("flush"), flush(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("rename"), rename(self, target))[1])
    atomic_writes.write_atomically(tmp_path / "a", "1")
    assert events == ["flush", "rename", "flush"]
    events.clear()
    atomic_writes.write_atomically(tmp_path / "b", "1", cached=True)
    assert events == ["rename"]


def test_a_hashed_file_is_flushed_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are published once their files are closed."""
    flush, sizes = os.fsync, list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: (sizes.append(os.fstat(fd).st_size), flush(fd))[1])
    entry = atomic_writes.write_hashed(tmp_path / "a", b"weights")
    assert entry["bytes"] == 7 and sizes == [7]


def test_a_folder_is_replaced_and_an_interrupted_replacement_undone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("first", "second"):
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        (fresh / "a").write_text(text)
        atomic_writes.replace_folder(fresh, target)
        assert (target / "a").read_text() == text and names(tmp_path) == ["model"]
    target.rename(tmp_path / ".model.old")  # killed between the two renames
    atomic_writes.restore_replaced_folder(target)
    assert (target / "a").read_text() == "second" and names(tmp_path) == ["model"]
    atomic_writes.restore_replaced_folder(target)
    assert names(tmp_path) == ["model"]
