"""Folders: free space, speed, no access."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megaswift.diagnosis import storage
from tests.diagnosis.fake_machine import only, states
from tests.diagnosis.test_host_limits import mounted


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_the_cache(environ: dict, path: str) -> None:
    assert str(storage.hugging_face_cache(environ)) == path


def test_a_folder_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SAMPLE", storage.CHUNK)
    monkeypatch.setattr(storage, "LITTLE_FREE", 0)
    monkeypatch.setattr(storage, "SLOW", 0)
    finding = only(storage.storage_findings(tmp_path / "a/b", {"HF_HOME": str(tmp_path)}))
    assert finding.state == "ok" and finding.found.startswith(f"{tmp_path}: ") and "MB/s" in finding.found
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_full_file_system(tmp_path: Path) -> None:
    if not mounted(tmp_path / "full", "1m"):
        pytest.skip("needs root and a tmpfs")
    try:
        found = {
            f.name: f for f in storage.storage_findings(tmp_path / "full/out", {"HF_HOME": str(tmp_path / "full")})
        }
        both = states(storage.storage_findings(tmp_path, {"HF_HOME": str(tmp_path / "full")}))
        left = list((tmp_path / "full").iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path / "full")], check=True)
    assert list(found) == ["output directory"], "one file system, one measurement"
    full = found["output directory"]
    assert full.state == "problem" and "No space left on device" in full.found and "another folder" in full.fix
    assert both["Hugging Face cache"] == "problem" and left == []


@pytest.mark.parametrize(
    ("free", "speed", "state", "fix"),
    [
        (1 << 20, 1e9, "problem", "free space"),
        (20 << 30, 1e9, "note", "--save_total_limit"),
        (1 << 50, 5e6, "note", "--save_steps"),
        (1 << 50, 1e9, "ok", ""),
    ],
)
def test_little_space_and_slow_disks(
    free: int, speed: float, state: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(storage, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(storage, "writing_speed", lambda folder: speed)
    finding = storage.folder_finding("x", tmp_path)
    assert finding.state == state and fix in finding.fix and f"{speed / 1e6:,.0f} MB/s" in finding.found


def test_no_access(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = storage.folder_finding("x", Path("/proc/self"))
    assert finding.state == "problem" and "/proc/" in finding.found and "write access" in finding.fix
