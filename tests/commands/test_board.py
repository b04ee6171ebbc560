"""`megaswift board`: what it refuses before it serves."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from megaswift.commands import board
from megaswift.errors import UserError


def test_a_folder_that_is_not_there_a_short_token_and_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        board.main([str(tmp_path / "none"), "--token", "short"])
    told = "\n".join(str(problem) for problem in caught.value.problems)
    assert "none: is not a folder" in told and "--token or MEGASWIFT_BOARD_TOKEN: is shorter than 8" in told
    assert "needs gradio\n    try: pip install 'megaswift[board]'" in told


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual port gives way to a free one; one that was asked for does not."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(UserError, match="cannot be listened on"):
            board._listener("127.0.0.1", taken)
        monkeypatch.setattr(board, "PORT", taken)
        with board._listener("127.0.0.1", taken) as listener:
            name: Any = listener.getsockname()
            assert name[0] == "127.0.0.1" and name[1] != taken
