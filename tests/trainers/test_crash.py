"""A process killed at any point of a save leaves a checkpoint to go on from: the old one or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
def test_kill_at_every_file_operation_of_a_save(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trainers.crash", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 4 and all(len(points) > 15 for points in found.values())
    for scene in found:
        old = [2 if scene.startswith("next") else 4, "old", []]
        new = [4, "new", []]
        states = [after for after, _, _ in found[scene]]
        assert all(state in (old, new) for state in states), states
        assert states[0] == old and states[-1] == new
        assert states == sorted(states, key=lambda s: s == new), "once the new one counts, it counts"
        for _, again, names in found[scene]:
            assert again == new and names == ["latest.json", "step-4"]
