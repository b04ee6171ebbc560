"""Status and end of jobs that are processes of a host: only a process that runs a file of the job is theirs.

Covers: local_processes, ssh_hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.job_folder import write_record
from megaswift.clusters.scheduler import scheduler_of
from megaswift.commands import jobs
from tests.clusters.jobs import job
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


JOB = """\
echo first
while [ ! -e "$0.seen" ]; do sleep 0.05; done
echo last
"""
"""A job whose second line comes when someone has looked at it."""


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_logs_that_are_followed_end_with_the_job(
    launcher: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "BETWEEN_LOOKS_S", 0.05)
    has_ended = jobs._has_ended

    def look(alive: Sequence[str]) -> bool:
        ended = has_ended(alive)
        (folder / "job.sh.seen").touch()
        return ended

    monkeypatch.setattr(jobs, "_has_ended", look)
    (folder / "job.sh").write_text(JOB)
    with (folder / ("job.log" if launcher == "local" else "node-0.log")).open("w") as log:
        started = subprocess.Popen(["bash", str(folder / "job.sh")], stdout=log)
    (folder / "node-0.pid").write_text(f"{started.pid}\n")
    write_record(job(launcher, folder=folder), str(started.pid) if launcher == "local" else "node-a node-b", "")
    for said in (["the job has ended"], []):  # the second time there is nothing to wait for
        assert main(["jobs", "logs", str(folder), "--follow"]) == 0
        printed = capfd.readouterr()
        assert printed.out.splitlines() == ["first", "last"]
        assert [line for line in printed.err.splitlines() if "has ended" in line] == [f"megaswift: {s}" for s in said]
    assert started.wait(timeout=30) == 0


def test_a_host_that_ssh_does_not_reach_has_not_ended(folder: Path) -> None:
    (folder / "ssh").write_text("#!/bin/bash\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    words = scheduler_of("ssh").alive(SubmittedJob("run", "lab", "ssh", "node-a", str(folder), ""))
    assert words is not None
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    assert subprocess.run(list(words), env=environ, timeout=300, check=False).returncode == 255
