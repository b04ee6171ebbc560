"""A process that ends with exit code 0 before its run is finished is noticed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megaswift.launchers.finish_marks import FOLDER, unfinished_mark, unfinished_text


def test_marks_of_processes_that_have_not_finished_stay(tmp_path: Path) -> None:
    assert unfinished_text(tmp_path) == ""
    first = {FOLDER: str(tmp_path), "RANK": "0"}
    second = {FOLDER: str(tmp_path), "RANK": "1"}
    with suppress(ZeroDivisionError), unfinished_mark(first):
        raise ZeroDivisionError
    with unfinished_mark(second), unfinished_mark({"RANK": "2"}):
        assert "2 processes ended with exit code 0" in unfinished_text(tmp_path)
    assert "1 process ended with exit code 0" in unfinished_text(tmp_path)
    with unfinished_mark(first):  # another attempt of the process
        pass
    assert unfinished_text(tmp_path) == ""


@pytest.mark.process
@pytest.mark.parametrize(("leaves", "code"), [("os._exit(0)", 2), ("pass", 0)])
@pytest.mark.parametrize("trains", [True, False])
def test_torchruns_agent_notices_processes_that_leave(trains: bool, leaves: str, code: int, tmp_path: Path) -> None:
    """Programs that do not train have no mark."""
    script = tmp_path / "leaves.py"
    block = "with unfinished_mark(os.environ):" if trains else "if True:"
    script.write_text(
        f"import os\nfrom megaswift.launchers.finish_marks import unfinished_mark\n{block}\n    {leaves}\n",
        encoding="utf-8",
    )
    words = ["-m", "megaswift.launchers.torchrun_agent", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    expected = code if trains else 0
    assert done.returncode == expected
    assert ("2 processes ended with exit code 0 before the run was finished" in done.stderr) == bool(expected)
