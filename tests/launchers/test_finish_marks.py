"""A process that ends with exit code 0 before its run is finished is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.launchers.finish_marks import FOLDER, mark_finished, unfinished_text


def test_marks_of_the_last_attempt_count(tmp_path: Path) -> None:
    assert "the process ended with exit code 0" in unfinished_text(tmp_path, 1)
    mark_finished({FOLDER: str(tmp_path), "RANK": "0"})
    mark_finished({"RANK": "1"})
    assert not unfinished_text(tmp_path, 1) and "1 of 2 processes ended" in unfinished_text(tmp_path, 2)
    for rank in "01":
        mark_finished({FOLDER: str(tmp_path), "RANK": rank, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert not unfinished_text(tmp_path, 2) and "1 of 3" in unfinished_text(tmp_path, 3)


@pytest.mark.process
@pytest.mark.parametrize(("marks", "code"), [("", 2), ("mark_finished(os.environ); ", 0)])
def test_torchruns_agent_notices_processes_that_leave(marks: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        f"import os\nfrom megaswift.launchers.finish_marks import mark_finished\n{marks}os._exit(0)\n",
        encoding="utf-8",
    )
    words = ["-m", "megaswift.launchers.torchrun_agent", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert ("2 of 2 processes ended with exit code 0 before the run was finished" in done.stderr) == bool(code)
