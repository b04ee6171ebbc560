"""Ray: a job submitted to a running cluster, or a RayJob or RayCluster manifest for KubeRay (ray.io/v1).

The run itself starts its workers by `--launcher ray`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from megaswift.clusters.job import RUN_FILE, Job, RenderedJob, Role, SubmittedJob
from megaswift.clusters.kubernetes import (
    NOT_RUN,
    RESOURCE_NAME,
    deletion,
    kubectl,
    pod_logs,
    pod_problems,
    pod_warnings,
    resources_and_pods,
)
from megaswift.clusters.pods import (
    QUEUE_LABEL,
    RUN_FOLDER,
    manifest_text,
    metadata,
    node_command,
    pod_metadata,
    pod_spec,
    run_config_map,
    unexpanded,
)
from megaswift.errors import Problem
from megaswift.launchers.ray_cluster import ROLE_LABEL, TRAINER

MANIFEST = "job.yaml"
RUNTIME = "runtime_env.yaml"
KUBERAY = ("rayjob", "raycluster")
"""Values of submit_to for which there is a manifest."""
RESOURCES = ("rayjobs.ray.io", "rayclusters.ray.io")
"""The resources of a job: KubeRay copies a RayJob's labels to the RayCluster that it makes."""
COUNTED_BY_RAY = ("NNODES", "NPROC_PER_NODE")
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}


class RayScheduler:
    """`ray job`, or kubectl with KubeRay's resources."""

    shares_files = False
    id_pattern = RESOURCE_NAME

    def problems(self, job: Job) -> list[Problem]:
        """An address, or what a manifest needs."""
        where = f"cluster {job.cluster.name}"
        if job.cluster.get("submit_to") != "address":
            version = (
                [] if job.cluster.get("ray_version") else [Problem(where, "needs ray_version", "ray_version: 2.51.0")]
            )
            return [*pod_problems(job), *version]
        if not job.cluster.get("address"):
            return [
                Problem(where, "needs the address of the dashboard", "address: http://HOST:8265, or submit_to: rayjob")
            ]
        if job.cluster.get("secrets"):
            rule = "secrets would be in the job's files of the Ray cluster"
            return [Problem(where, rule, "set the variables where `ray start` runs")]
        return []

    def warnings(self, job: Job) -> list[str]:
        """Returns the warnings about the pods of a manifest."""
        return pod_warnings(job) if job.cluster.get("submit_to") in KUBERAY else []

    def render(self, job: Job) -> RenderedJob:
        """`ray job submit` with a runtime environment, or the manifest."""
        if job.cluster.get("submit_to") == "address":
            runtime = {"working_dir": str(job.folder), "env_vars": _run_variables(job)}
            address = ["--address", str(job.cluster.get("address")), "--submission-id", job.name]
            words = ["ray", "job", "submit", *address, "--no-wait", "--runtime-env", str(job.folder / RUNTIME), "--"]
            text = yaml.safe_dump(runtime, sort_keys=False, allow_unicode=True)
            return RenderedJob({RUNTIME: text}, [[*words, "bash", "-c", _entry(job, RUN_FILE)]])
        in_cluster = job.cluster.get("submit_to") == "raycluster"
        made = [_ray_cluster(job), _job_of_cluster(job)] if in_cluster else [_ray_job(job)]
        text = manifest_text([run_config_map(job), *made])
        command = [*kubectl(job.cluster.get("context"), job.cluster.get("namespace")), "create", "-f"]
        return RenderedJob({MANIFEST: text}, [[*command, str(job.folder / MANIFEST)]], NOT_RUN)

    def job_id(self, output: str, job: Job) -> str:
        """The name: it is the submission id and the resource's name."""
        return job.name

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """Ray's own word, or KubeRay's of the run and its cluster."""
        return self._words(job, "status", resources_and_pods(RESOURCES, job.id))

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """The driver's output: on Kubernetes of the Job, named like the RayJob, with which KubeRay submits the run."""
        words = self._words(job, "logs", pod_logs(f"job-name={job.id}", follow))
        return [*words, *(["--follow"] if follow and not _on_kubernetes(job) else [])]

    def alive(self, job: SubmittedJob) -> None:
        """Ray's client and kubectl end with the driver."""

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """SIGTERM to the driver, which saves; or the resource's end."""
        return self._words(job, "stop", deletion([*RESOURCES, "configmaps"], job.id))

    @staticmethod
    def _words(job: SubmittedJob, verb: str, of_kubectl: Sequence[str]) -> list[str]:
        if _on_kubernetes(job):
            return [*kubectl(job.options.get("context"), job.options.get("namespace")), *of_kubectl]
        return ["ray", "job", verb, "--address", str(job.options["address"]), job.id]


def _on_kubernetes(job: SubmittedJob) -> bool:
    return job.options.get("submit_to", "address") != "address"


def _run_variables(job: Job) -> dict[str, str]:
    """Returns the driver's environment. Ray counts processes itself, so torchrun's variables are left out."""
    return {k: v for k, v in job.environment().items() if k not in COUNTED_BY_RAY}


def _run_words(job: Job, run_file: str) -> list[str]:
    workers = ["--launcher", "ray", "--ray_address", "auto", "--num_workers", str(job.nodes * job.processes_per_node)]
    return [*job.command(run_file), *workers, "--use_gpu", "true" if job.gpus_per_node else "false"]


def _entry(job: Job, run_file: str) -> str:
    """Returns the driver's command; workers start in its folder. Without workdir that is Ray's folder: its copy of the
    job's files, or the image's."""
    words = [shlex.quote(word) for word in _run_words(job, run_file)]
    lines = [str(line) for line in job.cluster.get("setup") or ()]
    if workdir := job.cluster.get("workdir"):
        words[words.index("train") + 1] = '"$run"'
        place = shlex.quote(run_file) if run_file.startswith("/") else f'"$PWD"/{shlex.quote(run_file)}'
        lines = [f"run={place}", f"cd -- {shlex.quote(str(workdir))} || exit 1", *lines]
    return "\n".join([*lines, f"exec {' '.join(words)}"])


def _ray_cluster(job: Job) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata(job), "spec": _cluster_spec(job)}


def _job_of_cluster(job: Job) -> dict[str, Any]:
    """The run on the RayCluster of the same manifest. It has no retries, for which KubeRay makes new clusters, and no
    queue, which is the cluster's."""
    about = metadata(job)
    about["labels"] = {name: value for name, value in about["labels"].items() if name != QUEUE_LABEL}
    spec = {**_entry_fields(job), "clusterSelector": {"ray.io/cluster": job.name}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}


def _entry_fields(job: Job) -> dict[str, Any]:
    """KubeRay puts the entry point into the arguments of a pod of its own, which the kubelet expands. Variables come
    from the pods of the cluster: `runtimeEnvYAML` would pass them through double quotes of a shell."""
    return {"entrypoint": unexpanded(shlex.join(["bash", "-c", _entry(job, f"{RUN_FOLDER}/{RUN_FILE}")]))}


def _ray_job(job: Job) -> dict[str, Any]:
    spec = {
        **_entry_fields(job),
        "shutdownAfterJobFinishes": True,
        "backoffLimit": job.cluster.get("retries"),
        "rayClusterSpec": _cluster_spec(job),
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(job), "spec": spec}


def _cluster_spec(job: Job) -> dict[str, Any]:
    """Every node of the job is one pod; the first is the head too. Other roles have a pod for each actor, and labels
    keep them and the run's processes apart."""

    def group(container: str, job: Job = job, role: str = TRAINER) -> dict[str, Any]:
        pod = pod_spec(job, container, node_command(job, [], "true"))
        del pod["restartPolicy"], pod["containers"][0]["command"]  # KubeRay writes `ray start`
        env = pod["containers"][0]["env"]
        pod["containers"][0]["env"] = [variable for variable in env if variable["name"] not in COUNTED_BY_RAY]
        if container == "ray-head":
            pod["containers"][0]["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
        labels = {"labels": {ROLE_LABEL: role}} if job.roles else {}  # KubeRay 1.5 or later
        return {**labels, "rayStartParams": {}, "template": {"metadata": pod_metadata(job), "spec": pod}}

    workers = [{**_replicas("nodes", job.nodes - 1), **group("ray-worker")}] if job.nodes > 1 else []
    workers += [
        {**_replicas(role.name, role.actors), **group("ray-worker", _job_of_role(job, role), role.name)}
        for role in job.roles
    ]
    return {
        "rayVersion": str(job.cluster.get("ray_version")),
        "headGroupSpec": group("ray-head"),
        "workerGroupSpecs": workers,
    }


def _replicas(name: str, count: int) -> dict[str, Any]:
    return {"groupName": name, "replicas": count, "minReplicas": count, "maxReplicas": count}


def _job_of_role(job: Job, role: Role) -> Job:
    """Return a job whose nodes are the pods of a role: devices, memory and labels of the run's nodes are not theirs."""
    left_out = {"resources", "memory_per_node", "network"} | ({"node_selector"} if not role.gpus else set())
    options = {name: value for name, value in job.cluster.options.items() if name not in left_out}
    cluster = replace(job.cluster, options={**options, "cpus_per_node": role.cores})
    return replace(job, cluster=cluster, gpus_per_node=role.gpus)


SCHEDULER = RayScheduler()
