"""Ranks of one start on a node: one downloads, the others take its result.

Covers: megaswift/families/download_once_per_node.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.families.download_once_per_node import download_once_per_node
from tests.sources import ROOT

RANK = """
import sys, time
from pathlib import Path
from megaswift.families.download_once_per_node import download_once_per_node
calls, target = Path(sys.argv[1]), Path(sys.argv[2])
def download():
    with calls.open("a") as f:
        f.write("x")
    time.sleep(0.3)
    target.mkdir(exist_ok=True)
    return target
print(download_once_per_node(("hub", "a/b"), download))
"""


def start(folder: Path, environ: dict[str, str], ranks: int) -> list[str]:
    """What ranks print that start together."""
    words = [sys.executable, "-c", RANK, str(folder / "calls"), str(folder / "model")]
    whole = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **environ}
    them = [subprocess.Popen(words, env=whole, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    return [process.communicate(timeout=60)[0].strip() for process in them]


@pytest.mark.process
def test_one_rank_downloads(tmp_path: Path) -> None:
    """Once for three ranks; again for the next start, whose files may be newer; by everyone without other ranks."""
    environ = {"LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "one"}
    assert start(tmp_path, environ, 3) == [str(tmp_path / "model")] * 3
    assert (tmp_path / "calls").read_text() == "x"
    start(tmp_path, {**environ, "TORCHELASTIC_RUN_ID": "two"}, 3)
    assert (tmp_path / "calls").read_text() == "xx"
    start(tmp_path, {"LOCAL_WORLD_SIZE": "1"}, 2)
    assert (tmp_path / "calls").read_text() == "xxxx"


def test_failures_and_foreign_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is the caller's, and the next rank tries; a folder that others can write is not used."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def fail() -> Path:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        download_once_per_node(("m",), fail)
    (tmp_path / "model").mkdir()
    assert download_once_per_node(("m",), lambda: tmp_path / "model") == tmp_path / "model"
    assert download_once_per_node(("m",), fail) == tmp_path / "model"
    with pytest.raises(OSError, match="no network"):
        download_once_per_node(("m", "other patterns"), fail)
    (tmp_path / f"megaswift-{os.getuid()}").chmod(0o777)
    with pytest.raises(OSError, match="no network"):
        download_once_per_node(("m",), fail)
