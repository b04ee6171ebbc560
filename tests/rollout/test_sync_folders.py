"""Folders by which new weights go to samplers: one at a time, and none in the end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megaswift.rollout import sync_folders
from megaswift.rollout.sync_folders import SyncRounds


@pytest.mark.parametrize(("theirs", "others"), [(False, False), (True, False), (False, True)])
def test_nothing_is_left(theirs: bool, others: bool, tmp_path: Path) -> None:
    """But a folder that the user made, or in which another run is at work."""
    root = tmp_path / "out" / "sync"
    if theirs:
        root.mkdir(parents=True)
    rounds = SyncRounds(root, "adapter")
    for _ in range(2):
        folder = rounds.begin()
        folder.mkdir(parents=True)
        rounds.taken(folder)
        assert list(root.iterdir()) == [folder]
    if others:
        (root / "adapter-of-another").mkdir()
    rounds.close()
    rounds.close()
    assert root.exists() == (theirs or others)
    assert not root.exists() or [f.name for f in root.iterdir()] == ["adapter-of-another"] * others


def test_what_killed_runs_have_left_in_memory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a living process uses, nor anything else; on a disk, which machines may share, nothing goes."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    kept = {f"adapter-{os.getppid()}-3", f"weights-{dead.pid}-2", "adapter-notes-1"}
    for name in (*kept, f"adapter-{dead.pid}-7"):
        (tmp_path / name).mkdir()
    SyncRounds(tmp_path, "adapter").begin()
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(sync_folders, "SHARED_MEMORY", tmp_path.parent)
    SyncRounds(tmp_path, "adapter").begin()
    assert {path.name for path in tmp_path.iterdir()} == kept
