"""Folders by which new weights go to samplers: one at a time, and none in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.rollout.write_weight_sync_folders import SyncRounds


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
