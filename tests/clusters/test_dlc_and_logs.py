"""Limits of PAI-DLC's options, and the commands that follow the output of many pods.

Covers: pai_dlc, kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import main
from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.job_folder import write_record
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.jobs import job


def submitted(launcher: str, **options: Any) -> SubmittedJob:
    return SubmittedJob("run", "lab", launcher, "run", "/out/jobs/run", "2026-01-01T00:00:00", options)


@pytest.mark.parametrize(
    ("launcher", "options"),
    [("kubernetes", {"kind": "job"}), ("kubernetes", {"kind": "mpijob"}), ("ray", {"submit_to": "rayjob"})],
)
def test_the_output_of_more_than_five_pods_is_followed(launcher: str, options: dict[str, Any]) -> None:
    """kubectl refuses to follow more pods than --max-log-requests, 5 by default; without -f it has no limit."""
    scheduler, record = scheduler_of(launcher), submitted(launcher, **options)
    (limit,) = [word for word in scheduler.logs(record, True) if word.startswith("--max-log-requests=")]
    assert int(limit.partition("=")[2]) >= 1024 and "-f" in scheduler.logs(record, True)
    assert not any(word.startswith(("--max-log", "-f")) for word in scheduler.logs(record, False))


@pytest.mark.parametrize(("priority", "refused"), [(1, False), (9, False), (10, True)])
def test_priorities_of_dlc(priority: int, refused: bool) -> None:
    problems = scheduler_of("dlc").problems(job("dlc", priority=priority))
    assert [p.rule for p in problems] == (["must be from 1 to 9"] if refused else [])


def test_output_that_cannot_be_followed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dlc").write_text("#!/bin/sh\n")
    (tmp_path / "dlc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    write_record(job("dlc", folder=tmp_path), "dlc1k2x3y4", "")
    assert main(["jobs", "logs", str(tmp_path)]) == 0
    assert "cannot wait" not in capsys.readouterr().err
    assert main(["jobs", "logs", str(tmp_path), "--follow"]) == 0
    assert "dlc cannot wait for more output" in capsys.readouterr().err
    assert main(["jobs", "status", str(tmp_path), "-f"]) == 2
    assert "--follow: has no effect on megaswift jobs status" in capsys.readouterr().err


@pytest.mark.parametrize("job_id", ["dlc1k2x3y4z5", "dlc-20210126170216-1k2x3y4z"])
def test_the_id_of_a_job_of_dlc(job_id: str) -> None:
    assert scheduler_of("dlc").job_id(f"| JobId | {job_id} |\nname: dlc-run", job("dlc")) == job_id


def test_a_configuration_that_pai_would_refuse() -> None:
    """Its limit is 65,536 bytes for all parameters; characters of three bytes count as three."""
    scheduler = scheduler_of("dlc")
    assert scheduler.problems(job("dlc", run_text="a" * 58_000)) == []
    (problem,) = scheduler.problems(job("dlc", run_text="\u5b57" * 20_000))
    assert "the command of the job" in problem.what and "60000" in problem.rule
