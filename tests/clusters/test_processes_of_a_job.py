"""Status and end of jobs that are processes of a host: only a process that runs a file of the job is theirs.

Covers: local_processes, ssh_hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.programs import SSH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the job, with a name that a shell must not read."""
    made = tmp_path / "it's $(a) job"
    made.mkdir()
    return made


@pytest.fixture(params=["own", "another"])
def process(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], bool]]:
    """One that runs a file of the job, or one that has got its process id since; and whether it is the job's."""
    own = request.param == "own"
    words = [sys.executable, "-c", "import time; time.sleep(60)", f"{folder}/job.sh" if own else f"{folder}-2/job.sh"]
    with subprocess.Popen(words) as started:
        yield started, own
        started.kill()


def run(launcher: str, verb: str, job_id: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What `megaswift jobs` runs, with a stand-in for ssh."""
    tool = folder / "ssh"
    tool.write_text(SSH)
    tool.chmod(0o755)
    record = SubmittedJob("run", "lab", launcher, job_id, str(folder), "2026-01-01T00:00:00")
    words = list(getattr(scheduler_of(launcher), verb)(record))
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_only_the_job_s_own_process_is_shown_and_ended(
    launcher: str, process: tuple[subprocess.Popen[bytes], bool], folder: Path
) -> None:
    started, own = process
    (folder / "node-0.pid").write_text(f"{started.pid}\n")
    job_id = str(started.pid) if launcher == "local" else "node-a"
    status = run(launcher, "status", job_id, folder)
    running = "STAT" if launcher == "local" else "node-a running\n"
    assert (running in status.stdout) == own and ("ended" in status.stdout) != own
    assert status.returncode == (0 if own or launcher == "ssh" else 1)
    cancelled = run(launcher, "cancel", job_id, folder)
    assert ("ended" in cancelled.stdout) != own and cancelled.stderr == ""
    if own:
        assert started.wait(timeout=30) == -15
        assert "ended" in run(launcher, "status", job_id, folder).stdout
    else:
        assert started.poll() is None
