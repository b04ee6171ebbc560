"""Limits of PAI-DLC's options, and the commands that follow the output of many pods.

Covers: pai_dlc, kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.clusters.cluster_and_job import SubmittedJob
from megaswift.clusters.scheduler_protocol import scheduler_of
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


def test_a_configuration_that_pai_would_refuse() -> None:
    """Its limit is 65,536 bytes for all parameters; characters of three bytes count as three."""
    scheduler = scheduler_of("dlc")
    assert scheduler.problems(job("dlc", run_text="a" * 58_000)) == []
    (problem,) = scheduler.problems(job("dlc", run_text="\u5b57" * 20_000))
    assert "the command of the job" in problem.what and "60000" in problem.rule
