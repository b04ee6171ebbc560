"""Data files are hashed by one process, once: later starts and other nodes compare path, size and time of change."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megaswift.data import tokenization
from megaswift.data.store import shared_build
from tests.data.test_tokenization import ROWS, expected, texts, write


def test_data_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start compares path, size and time; another time of change is another look at the content, which is the
    same."""
    hashed: list[str] = []
    real = tokenization._file_hash
    monkeypatch.setattr(tokenization, "_file_hash", lambda path: hashed.append(path.name) or real(path))
    path = Path(write(tmp_path / "a.jsonl", ROWS))
    for again in range(3):
        assert texts(tmp_path, str(path)) == expected(ROWS) and hashed == ["a.jsonl"], again
    os.utime(path, (1e9, 1e9))
    assert texts(tmp_path, str(path)) == expected(ROWS) and hashed == ["a.jsonl"] * 2
    assert len(list((tmp_path / "cache").glob("*/tokens.bin"))) == 1


def test_nodes_that_share_the_cache_hash_once(tmp_path: Path) -> None:
    """Both start before either has published."""
    made: list[int] = []

    def make() -> str:
        made.append(1)
        time.sleep(0.2)
        return "key"

    keys: list[str] = []
    find = shared_build.content_hash_of_input_files
    nodes = [threading.Thread(target=lambda: keys.append(find(tmp_path, "name", make))) for _ in range(3)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert keys == ["key"] * 3 and made == [1]
