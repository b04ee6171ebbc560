"""The command lines of kubectl for status, output and end of a job: they select what its manifest has made.

Covers: kubernetes, ray_jobs, job_folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.cli import main
from megaswift.clusters.job import Job, SubmittedJob
from megaswift.clusters.job_folder import write_job_files, write_record
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.jobs import job
from tests.clusters.test_manifests import MANIFESTS
from tests.clusters.test_rendered_files import JOBS

NO_RESOURCE_OF_A_JOB = ("ConfigMap", "Service")


def submitted(made: Job, folder: Path) -> SubmittedJob:
    """Its record as `megaswift jobs` reads it."""
    made = replace(made, folder=folder / "run")
    write_job_files(made, scheduler_of(made.cluster.launcher).render(made))
    return write_record(made, made.name, "2026-01-01T00:00:00")


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Of pods, with their metadata."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value
        for item in value.values():
            yield from templates(item)
    elif isinstance(value, list):
        for item in value:
            yield from templates(item)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_selector_finds_the_resources_and_their_pods(name: str, tmp_path: Path) -> None:
    record = submitted(JOBS[name], tmp_path)
    words = list(scheduler_of(record.launcher).status(record))
    kinds = words[words.index("get") + 1].split(",")
    key, _, value = words[words.index("-l") + 1].partition("=")
    assert kinds[-1] == "pods"
    found = list(yaml.safe_load_all((tmp_path / "run/job.yaml").read_text()))
    for document in found:
        if document["kind"] not in NO_RESOURCE_OF_A_JOB:
            assert f"{document['kind'].lower()}s.{document['apiVersion'].partition('/')[0]}" in kinds
            assert document["metadata"]["labels"][key] == value
    deleted = list(scheduler_of(record.launcher).cancel(record))
    assert {f"{document['kind'].lower()}s" for document in found} <= {
        kind.partition(".")[0] for kind in deleted[deleted.index("delete") + 1].split(",")
    }
    assert all(document["metadata"]["labels"]["app.kubernetes.io/name"] == "megaswift" for document in found)
    assert all(document["metadata"]["labels"][key] == value for document in found)
    pods = list(templates(found))
    assert pods and all(pod["metadata"]["labels"][key] == value for pod in pods)


@pytest.mark.parametrize(
    ("made", "status", "logs", "deleted"),
    [
        (
            job("kubernetes", namespace="train", context="prod"),
            "get jobs.batch,pods -l app.kubernetes.io/instance=run",
            "logs -l app.kubernetes.io/instance=run --prefix --tail=-1",
            "jobs.batch,services,configmaps",
        ),
        (
            job("ray", submit_to="rayjob", namespace="train", context="prod"),
            "get rayjobs.ray.io,rayclusters.ray.io,pods -l app.kubernetes.io/instance=run",
            "logs -l job-name=run --prefix --tail=-1",
            "rayjobs.ray.io,rayclusters.ray.io,configmaps",
        ),
        (
            job("ray", submit_to="raycluster", namespace="train", context="prod"),
            "get rayjobs.ray.io,rayclusters.ray.io,pods -l app.kubernetes.io/instance=run",
            "logs -l job-name=run --prefix --tail=-1",
            "rayjobs.ray.io,rayclusters.ray.io,configmaps",
        ),
    ],
    ids=["job", "rayjob", "raycluster"],
)
def test_what_jobs_runs(
    made: Job, status: str, logs: str, deleted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's output of a Ray job is that of the Job which KubeRay makes for it, under the same name."""
    record = submitted(made, tmp_path / "out/jobs")
    tool = tmp_path / "kubectl"
    tool.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {tmp_path}/words\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    out = str(tmp_path / "out")
    for words in (["status", out], ["logs", out], ["logs", out, "--follow"], ["cancel", out]):
        assert main(["jobs", *words]) == 0
    cluster = "--context=prod --namespace=train"
    assert (tmp_path / "words").read_text().splitlines() == [
        f"{cluster} {status}",
        f"{cluster} {logs}",
        f"{cluster} {logs} -f --max-log-requests=10000",
        f"{cluster} delete {deleted} -l app.kubernetes.io/name=megaswift,app.kubernetes.io/instance=run --wait=false",
    ]
    assert json.loads((Path(record.folder) / "job.json").read_text())["id"] == "run"
