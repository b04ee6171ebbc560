"""What is rendered, held to files that were read line by line; run as a module, it writes them anew.

Covers: slurm, kubernetes, ray_jobs, pai_dlc, ssh_hosts, local_processes, scheduler_table, scheduler."""

from __future__ import annotations

import builtins
import io
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaswift.clusters.job import Job, Role, SubmittedJob
from megaswift.clusters.job_folder import KEPT
from megaswift.clusters.scheduler import scheduler_of
from megaswift.clusters.shell_lines import shell_words
from megaswift.clusters.table import SCHEDULERS
from tests.clusters.jobs import job

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = "commands_of_jobs.sh"
CLUSTER: dict[str, Any] = {
    "namespace": "train",
    "context": "prod",
    "mounts": [{"claim": "data", "path": "/data"}, {"host_path": "/models", "path": "/models", "read_only": True}],
    "secrets": {"HF_TOKEN": "hub/token"},
    "resources": {"rdma/ib": 8},
    "node_selector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "queue": "team-a",
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "environment": {"HF_HOME": "/data/hf"},
    "network": "infiniband",
    "cpus_per_node": 96,
    "memory_per_node": "900Gi",
    "nccl_ib_hca": "mlx5_0,mlx5_1",
    "annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"},
    "pod_patch": {"affinity": {"podAntiAffinity": {}}},
}
JOBS: dict[str, Job] = {
    "local": job("local", 1, 8, overrides=("--lr", "1e-5")),
    "slurm": job("slurm"),
    "slurm_all": job(
        "slurm",
        account="team",
        qos="high",
        constraint="h200&ib",
        reservation="maint",
        time_limit="1-00:00:00",
        exclusive=True,
        requeues=3,
        cpus_per_node=96,
        memory_per_node="900G",
        gres="gpu:h200:8",
        container_image="registry/megaswift:cuda",
        container_mounts="/data:/data",
        setup=["module load cuda/13", "source /opt/venv/bin/activate"],
        network="roce",
        secret_variables=["HF_TOKEN"],
        save_before_end=600,
        overrides=("--max_steps", "10"),
    ),
    "kubernetes_job": job("kubernetes", **CLUSTER),
    "kubernetes_trainjob": job("kubernetes", kind="trainjob", **CLUSTER),
    "kubernetes_trainjob_2_2": job("kubernetes", kind="trainjob", trainer_version="2.2", **CLUSTER),
    "kubernetes_trainjob_2_1": job("kubernetes", kind="trainjob", trainer_version="2.1", **CLUSTER),
    "kubernetes_pytorchjob": job("kubernetes", 3, kind="pytorchjob", host_network=True, **CLUSTER),
    "kubernetes_mpijob": job("kubernetes", kind="mpijob"),
    "kubernetes_infiniband": job(
        "kubernetes",
        64,
        namespace="train",
        network="infiniband",
        nccl_ib_hca="mlx5_0,mlx5_1",
        nccl_socket_ifname="eth0",
        annotations={"k8s.v1.cni.cncf.io/networks": "ib-a,ib-b"},
        security_context={"runAsUser": 0},
        pod_patch={"priorityClassName": "high", "containers": [{"env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}]},
        queue="team-a",
        mounts=[{"claim": "data", "path": "/data"}],
        overrides=("--system", "Write $$x$$"),
    ),
    "kubernetes_volcano": job("kubernetes", kind="volcano", **CLUSTER),
    "kubernetes_volcano_ascend": job("kubernetes", kind="volcano", gpu_resource="huawei.com/Ascend910"),
    "ray": job("ray", 2, 1, environment={"HF_HOME": "/data/hf"}),
    "rayjob": job("ray", 2, 8, submit_to="rayjob", ray_version="2.51.0", image="registry/megaswift:ray", **CLUSTER),
    "rayjob_roles": job(
        "ray",
        2,
        8,
        submit_to="rayjob",
        ray_version="2.51.0",
        image="registry/megaswift:ray",
        roles=(Role("engines", 4, 8, 2), Role("environments", 16, 1, 0)),
        **CLUSTER,
    ),
    "raycluster": job("ray", 1, 0, submit_to="raycluster", ray_version="2.51.0", image="registry/megaswift:ray"),
    "dlc": job("dlc", workspace_id="123", data_sources=["d-1", "d-2"], vpc_id="vpc-1", priority=5),
    "ssh": job("ssh", secret_variables=["HF_TOKEN"], ssh_options=["-p", "2222"], network="ethernet"),
}


def shown(made: Job) -> str:
    """The files and the command."""
    scheduler = scheduler_of(made.cluster.launcher)
    assert scheduler.problems(made) == []
    rendered = scheduler.render(made)
    files = [f"==== {name}\n{text}" for name, text in rendered.files.items()]
    return "\n".join([*files, "==== submitted by", *map(shell_words, rendered.commands)]) + "\n"


@pytest.mark.parametrize("name", JOBS)
def test_as_read(name: str) -> None:
    assert shown(JOBS[name]) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


FINISHED = {"slurm_all": "7", "local": "4711", "ssh": "node0 node1", "dlc": "dlc1k2x3y4", "ray": "run"}
"""Jobs, and the id that their tool printed; those of kubectl are in test_jobs_on_kubernetes.py."""


def asked(name: str) -> str:
    """What `megaswift jobs` runs for status, logs, logs --follow, whether the job has ended, and cancel."""
    cluster = JOBS[name].cluster
    kept = {option: cluster.get(option) for option in KEPT if cluster.get(option) is not None}
    record = SubmittedJob("run", "lab", cluster.launcher, FINISHED[name], "/out/jobs/run", "", kept)
    scheduler = scheduler_of(cluster.launcher)
    words = [scheduler.status(record), scheduler.logs(record, False), scheduler.logs(record, True)]
    words += [command for command in (scheduler.alive(record), scheduler.cancel(record)) if command]
    return "\n".join([f"==== {name}", *map(shell_words, words)]) + "\n"


def test_the_commands_of_jobs_as_read() -> None:
    assert "".join(map(asked, FINISHED)) == (GOLDEN / COMMANDS).read_text(encoding="utf-8")
    assert {JOBS[name].cluster.launcher for name in FINISHED} | {"kubernetes"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", ["dlc", "rayjob", "raycluster", *(n for n in JOBS if n.startswith("kubernetes"))])
def test_what_has_not_run_is_marked(name: str) -> None:
    made = JOBS[name]
    assert scheduler_of(made.cluster.launcher).render(made).not_run


def test_rendering_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files, processes and sockets, and twice the same."""
    first = {name: shown(made) for name, made in JOBS.items()}

    def used(*_: Any, **__: Any) -> Any:
        raise AssertionError("rendering has an effect")

    with monkeypatch.context() as patched:
        for module, names in ((builtins, ["open"]), (io, ["open"]), (os, ["open", "mkdir", "listdir", "stat"])):
            for name in names:
                patched.setattr(module, name, used)
        patched.setattr(subprocess, "Popen", used)
        patched.setattr(socket, "socket", used)
        again = {name: shown(made) for name, made in JOBS.items()}
    assert first == again


def test_every_launcher_is_there() -> None:
    assert {made.cluster.launcher for made in JOBS.values()} == set(SCHEDULERS)
    assert {f.stem for f in GOLDEN.glob("*.txt")} == set(JOBS)


if __name__ == "__main__":
    (GOLDEN / COMMANDS).write_text("".join(map(asked, FINISHED)), encoding="utf-8")
    for case, made_ in JOBS.items():
        (GOLDEN / f"{case}.txt").write_text(shown(made_), encoding="utf-8")
