"""What the tab of a run offers: to stop a job of this machine, to resume what has ended with a checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from megaswift.board.runs import find_runs
from megaswift.run.lock import RunLock
from tests.board.test_jobs import running_job
from tests.run.report.runs import line, write_folder

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio: pip install -e '.[board]'")


def offered(root: Path) -> tuple[str, bool, bool]:
    """The text, whether the run can be stopped, and whether it can be resumed."""
    from megaswift.board.run_tab import run_facts

    text, stop, resume = run_facts(next(iter(find_runs([root])), None))
    return text, stop["interactive"], resume["interactive"]


def test_no_run() -> None:
    from megaswift.board.run_tab import run_facts

    assert [each["interactive"] for each in run_facts(None)[1:]] == [False, False]


def test_a_job_can_be_stopped_and_a_run_of_a_terminal_cannot(tmp_path: Path) -> None:
    out = write_folder(tmp_path / "<b>run", [line(1)])
    lock = RunLock(out)
    lock.take()
    text, stop, resume = offered(tmp_path)
    assert "<b>&lt;b&gt;run</b>: running" in text and "started in a terminal" in text and not stop and not resume
    with running_job(out) as (process, _):
        text, stop, resume = offered(tmp_path)
        assert "started in a terminal" not in text and stop and not resume
        process.kill()
    lock.release()
    text, stop, resume = offered(tmp_path)
    assert "no checkpoint to resume from" in text and not stop and not resume
