"""Kubernetes: a TrainJob of Kubeflow Trainer, a PyTorchJob, an MPIJob, Volcano's Job, or an Indexed Job, which needs no
operator.

kubectl applies the manifest and answers for the job. Fields: Kubernetes' batch/v1 and v1, Kubeflow Trainer's
trainer.kubeflow.org/v1alpha1, the training operator's kubeflow.org/v1, the MPI operator's kubeflow.org/v2beta1,
Volcano's batch.volcano.sh/v1alpha1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaswift.clusters.job import Job, RenderedJob, SubmittedJob
from megaswift.clusters.pods import (
    INSTANCE_LABEL,
    MEGASWIFT,
    MERGED_BY,
    NAME_LABEL,
    NODE_NAME,
    QUEUE_LABEL,
    RDMA_DEVICE,
    RDMA_NETWORKS,
    asks_for_default_device,
    environment,
    manifest_text,
    metadata,
    names_device,
    node_command,
    patched_pod,
    placement,
    pod_metadata,
    pod_spec,
    resources,
    run_config_map,
    security_context,
    volume_mounts,
    volumes,
)
from megaswift.errors import EXPLAINED, Problem
from megaswift.launchers.options.variables import DEFAULT_PORT

MANIFEST = "job.yaml"
RESOURCES = {
    "job": "jobs.batch",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "mpijob": "mpijobs.kubeflow.org",
    "volcano": "jobs.batch.volcano.sh",
}
MOST_PODS = 10_000
"""Whose output kubectl follows: beyond any job's nodes and the pods that failed before them."""
MOUNT_KEYS = ("claim", "host_path", "config_map")
SECRET_PLACE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
RESOURCE_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
MANAGER = "megaswift.io/submit"
_TRAIN_JOB_POD = (
    "affinity",
    "containers",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "schedulingGates",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
TRAIN_JOB_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "2.1": (_TRAIN_JOB_POD, ("name", "volumeMounts")),
    "2.2": ((*_TRAIN_JOB_POD, "securityContext"), ("name", "securityContext", "volumeMounts")),
    "2.3": (
        (*_TRAIN_JOB_POD, "securityContext", "terminationGracePeriodSeconds"),
        ("name", "securityContext", "volumeMounts"),
    ),
}
"""Release of Kubeflow Trainer: fields of a pod and of a container that a TrainJob's patch has (its
CustomResourceDefinition). Variables of the container `node` are refused there: `environment` sets them."""
NOT_RUN = "the manifest is checked against published schemas; it has not run on a cluster"


class KubernetesScheduler:
    """kubectl."""

    shares_files = False
    id_pattern = RESOURCE_NAME

    def problems(self, job: Job) -> list[Problem]:
        """An image, mounts that name one source each, secrets by their keys; what a TrainJob has no field for."""
        found = [*_train_job_problems(job)] if job.cluster.get("kind") == "trainjob" else []
        return [*found, *pod_problems(job)]

    def warnings(self, job: Job) -> list[str]:
        """About pods that wait for each other, and RDMA."""
        runtime = job.cluster.get("kind") == "trainjob" and str(job.cluster.get("trainer_version")) == "2.1"
        locked = job.cluster.get("network") in RDMA_NETWORKS
        missing = f"cluster {job.cluster.name}: a TrainJob of Kubeflow Trainer 2.1 has no field for IPC_LOCK, which "
        missing += f"network: {job.cluster.get('network')} needs: the runtime's container must have it"
        return [*pod_warnings(job, job.cluster.get("kind") == "volcano"), *([missing] if runtime and locked else [])]

    def render(self, job: Job) -> RenderedJob:
        """The manifest: the configuration first."""
        documents = [run_config_map(job), *_KINDS[job.cluster.get("kind")](job)]
        command = [*kubectl(job.cluster.get("context"), job.cluster.get("namespace")), "create", "-f"]
        return RenderedJob({MANIFEST: manifest_text(documents)}, [[*command, str(job.folder / MANIFEST)]], NOT_RUN)

    def job_id(self, output: str, job: Job) -> str:
        """The name: kubectl creates what is not there, and fails on what is."""
        return job.name

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """The resource and its pods."""
        return [*_kubectl_of(job), *resources_and_pods([RESOURCES[_kind(job)]], job.id)]

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """Returns the command that prints the logs of all pods, each line with its pod."""
        return [*_kubectl_of(job), *pod_logs(f"{INSTANCE_LABEL}={job.id}", follow)]

    def alive(self, job: SubmittedJob) -> None:
        """kubectl ends with the last pod's output."""

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """Deletes the resources; pods get SIGTERM and time to save."""
        made = ("services", "configmaps") if _kind(job) == "job" else ("configmaps",)
        return [*_kubectl_of(job), *deletion([RESOURCES[_kind(job)], *made], job.id)]


def pod_warnings(job: Job, starts_together: bool = False) -> list[str]:
    """Returns the warnings that apply to every manifest. `starts_together`: the kind of resource starts all pods or
    none."""
    cluster = job.cluster
    found = []
    if job.nodes > 1 and not starts_together and not cluster.get("queue"):
        found.append(
            f"cluster {cluster.name}: the {job.nodes} pods may start one by one, and hold their GPUs while they wait "
            "for the others, unless something there schedules them together: queue: NAME of Kueue, or kind: volcano"
        )
    if asks_for_default_device(job):
        found.append(
            f"cluster {cluster.name}: network: infiniband asks for {RDMA_DEVICE}: 1 in each pod; where the device "
            "has another name or a pod needs several: resources: {NAME: N}"
        )
    elif cluster.get("network") in RDMA_NETWORKS and not names_device(job):
        found.append(
            f"cluster {cluster.name}: network: {cluster.get('network')} and no RDMA device: NCCL will use TCP, unless "
            "pods have the devices anyway: resources: {rdma/NAME: N}"
        )
    return found


def _train_job_problems(job: Job) -> Iterator[Problem]:
    """Options for which a TrainJob has no field: its runtime describes the pods, and what follows a failure."""
    cluster = job.cluster
    version = str(job.cluster.get("trainer_version"))
    where = f"cluster {cluster.name}"
    runtime = f"the ClusterTrainingRuntime {cluster.get('runtime')}"
    if cluster.get("host_network"):
        rule = "has no place in a TrainJob: its runtime describes the pods"
        fix = f"set hostNetwork in {runtime} and leave it out here, or use kind: pytorchjob"
        yield Problem(f"{where}: host_network", rule, fix)
    if "retries" in cluster.options:
        rule = "has no place in a TrainJob: its runtime says how often a failed job starts again"
        fix = f"set failurePolicy: {{maxRestarts: {cluster.get('retries')}}} in the JobSet of {runtime}, and leave "
        yield Problem(f"{where}: retries", rule, f"{fix}retries out here")
    pod_fields, container_fields = TRAIN_JOB_FIELDS[version]
    if cluster.get("security_context") and "securityContext" not in container_fields:
        rule = f"has no place in a TrainJob of Kubeflow Trainer {version}"
        yield Problem(f"{where}: security_context", rule, f"set it in {runtime}, or trainer_version: 2.2")
    patch = cluster.get("pod_patch") or {}
    containers = patch.get("containers") or []
    unknown = [name for name in patch if name not in pod_fields]
    unknown += [
        f"containers: {name}"
        for container in (containers if isinstance(containers, list) else ())
        for name in (container if isinstance(container, Mapping) else ())
        if name not in container_fields
    ]
    for name in unknown:
        rule = f"has no place in a TrainJob of Kubeflow Trainer {version}"
        yield Problem(f"{where}: pod_patch: {name}", rule, f"set it in {runtime}")


def pod_problems(job: Job) -> list[Problem]:
    """Returns the problems of options that every manifest reads."""
    where = f"cluster {job.cluster.name}"
    problems = []
    if not job.cluster.get("image"):
        problems.append(
            Problem(where, "needs an image", "image: REGISTRY/megaswift:cuda (docker/Dockerfile builds it)")
        )
    for mount in job.cluster.get("mounts") or ():
        sources = [key for key in MOUNT_KEYS if mount.get(key)]
        unknown = sorted(set(map(str, mount)) - {*MOUNT_KEYS, "path", "read_only"})
        if len(sources) != 1 or not str(mount.get("path", "")).startswith("/") or unknown:
            rule = f"needs path, absolute, and one of {', '.join(MOUNT_KEYS)}"
            problems.append(Problem(f"{where}: mounts: {dict(mount)}", rule, "{claim: data, path: /data}"))
    patch = job.cluster.get("pod_patch") or {}
    containers = patch.get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(container, Mapping) for container in containers):
        problems.append(Problem(f"{where}: pod_patch: containers", "must be a list of mappings", "[{env: [...]}]"))
    elif field := _unmergeable(patch):
        rule = "must be a list of mappings, as in a manifest"
        problems.append(Problem(f"{where}: pod_patch: {field}", rule, "[{name: ...}]"))
    elif "restartPolicy" in patch or any({"command", "args"} & {*one} for one in containers if "name" not in one):
        rule = "must leave restartPolicy, and command and args of the run's container, which the kind of job sets"
        problems.append(Problem(f"{where}: pod_patch", rule, "leave them out"))
    for name, place in (job.cluster.get("secrets") or {}).items():
        if not SECRET_PLACE.fullmatch(str(place)):
            rule = "must be SECRET/KEY: the name of a Kubernetes secret and a key in it"
            problems.append(
                Problem(f"{where}: secrets: {name}", rule, "kubectl create secret generic hub --from-literal=token=...")
            )
    return problems


def _unmergeable(patch: Any) -> str:
    """The first field below `patch` that is merged by the names of its items and is no list of mappings; else empty."""
    for name, value in patch.items():
        items = value if isinstance(value, list) else [value]
        is_list = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
        if name in MERGED_BY and value is not None and not is_list:
            return str(name)
        below = (_unmergeable(item) for item in items if isinstance(item, Mapping))
        if found := next(filter(None, below), ""):
            return found
    return ""


def kubectl(context: str | None, namespace: str | None) -> list[str]:
    """The words before a verb."""
    return [
        "kubectl",
        *([f"--context={context}"] if context else []),
        *([f"--namespace={namespace}"] if namespace else []),
    ]


def resources_and_pods(resources: Sequence[str], name: str) -> list[str]:
    """kubectl's words that list a job's resources of these kinds and its pods."""
    return ["get", ",".join([*resources, "pods"]), "-l", f"{INSTANCE_LABEL}={name}"]


def deletion(resources: Sequence[str], name: str) -> list[str]:
    """kubectl's words that delete a job's resources of these kinds. By label, not by the manifest in the job's folder:
    a file that others may have written would name what is deleted."""
    return ["delete", ",".join(resources), "-l", f"{NAME_LABEL}={MEGASWIFT},{INSTANCE_LABEL}={name}", "--wait=false"]


def pod_logs(label: str, follow: bool) -> list[str]:
    """kubectl's words for the output of all pods with a label. By default it follows at most five pods."""
    return [
        "logs",
        "-l",
        label,
        "--prefix",
        "--tail=-1",
        *(["-f", f"--max-log-requests={MOST_PODS}"] if follow else []),
    ]


def _kubectl_of(job: SubmittedJob) -> list[str]:
    return kubectl(job.options.get("context"), job.options.get("namespace"))


def _kind(job: SubmittedJob) -> str:
    return str(job.options.get("kind", "job"))


def _port(job: Job) -> str:
    return str(job.cluster.get("master_port") or DEFAULT_PORT)


def _indexed_job(job: Job) -> list[dict[str, Any]]:
    """Pods with an index each, behind a service without an address, so that pod 0 has a name."""
    command = node_command(job, ['export NODE_RANK="$JOB_COMPLETION_INDEX"'])
    address = {"MASTER_ADDR": f"{job.name}-0.{job.name}", "MASTER_PORT": _port(job)}
    template = {
        "metadata": pod_metadata(job, metadata(job)["labels"]),
        "spec": pod_spec(job, "megaswift", command, address),
    }
    template["spec"]["subdomain"] = job.name
    explained = {"containerName": "megaswift", "operator": "In", "values": list(EXPLAINED)}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.cluster.get("retries") * job.nodes,
        "podFailurePolicy": {
            "rules": [
                # A mistake would end the same again. The schemas of older releases (1.27) require both lists.
                {"action": "FailJob", "onExitCodes": explained, "onPodConditions": []},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": int(_port(job))}],
        },
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job), "spec": spec}]


def _train_job(job: Job) -> list[dict[str, Any]]:
    """Kubeflow Trainer: the runtime's torch policy sets PET_* variables."""
    lines = [
        'export NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"',
    ]
    trainer: dict[str, Any] = {
        "image": str(job.cluster.get("image")),
        "command": node_command(job, lines),
        "numNodes": job.nodes,
        "numProcPerNode": job.processes_per_node,
        "env": [*environment(job), NODE_NAME],
    }
    if needed := resources(job):
        trainer["resourcesPerNode"] = needed
    version = str(job.cluster.get("trainer_version"))
    pod_fields, container_fields = TRAIN_JOB_FIELDS[version]
    container = {"name": "node", "securityContext": security_context(job), "volumeMounts": volume_mounts(job)}
    container = {name: value for name, value in container.items() if value and name in container_fields}
    pod: dict[str, Any] = {**placement(job), "containers": [container], "volumes": volumes(job)}
    pod = patched_pod(job, {name: value for name, value in pod.items() if name in pod_fields})
    if version == "2.1":
        override = {"targetJobs": [{"name": "node"}], "metadata": pod_metadata(job), "spec": pod}
        patches: dict[str, Any] = {"podTemplateOverrides": [override]}
    else:
        template = {"metadata": pod_metadata(job), "spec": pod}
        node = {"name": "node", "template": {"spec": {"template": template}}}
        patch = {"template": {"spec": {"replicatedJobs": [node]}}}
        patches = {"runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patch}]}
    spec = {"runtimeRef": {"name": str(job.cluster.get("runtime"))}, "trainer": trainer, **patches}
    return [
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata(job), "spec": spec}
    ]


def _replica(job: Job, count: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Equal pods of a PyTorchJob or MPIJob."""
    template = {"metadata": pod_metadata(job), "spec": pod}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": template}


def _pytorch_job(job: Job) -> list[dict[str, Any]]:
    """The training operator sets MASTER_ADDR, MASTER_PORT, and RANK as the number of the pod."""
    lines = ['export NODE_RANK="${PET_NODE_RANK:-$RANK}"', "unset RANK WORLD_SIZE"]
    pod = pod_spec(job, "pytorch", node_command(job, lines))
    del pod["restartPolicy"]  # the replica's own
    workers = {"Worker": _replica(job, job.nodes - 1, pod)} if job.nodes > 1 else {}
    spec = {
        "nprocPerNode": str(job.processes_per_node),
        "runPolicy": {"backoffLimit": job.cluster.get("retries"), "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": {"Master": _replica(job, 1, pod), **workers},
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata(job), "spec": spec}]


def _mpi_job(job: Job) -> list[dict[str, Any]]:
    """The MPI operator: mpirun starts one launcher on each worker. The image needs Open MPI and an ssh server."""
    own = {"MASTER_ADDR": f"{job.name}-worker-0.{job.name}", "MASTER_PORT": _port(job)}
    start = node_command(job, ['export NODE_RANK="$OMPI_COMM_WORLD_RANK"'])
    names = [str(e["name"]) for e in environment(job, own)]
    mpirun = ["mpirun", "--allow-run-as-root", "-np", str(job.nodes), "--map-by", "ppr:1:node", "--bind-to", "none"]
    mpirun += [word for name in names for word in ("-x", name)]
    launcher = pod_spec(job, "launcher", [*mpirun, *start], own)
    launcher["containers"][0].pop("resources", None)
    worker = pod_spec(job, "worker", ["/usr/sbin/sshd", "-De"], own)
    del launcher["restartPolicy"], worker["restartPolicy"]
    spec = {
        "slotsPerWorker": 1,
        "runPolicy": {"backoffLimit": job.cluster.get("retries"), "cleanPodPolicy": "Running"},
        "mpiReplicaSpecs": {
            "Launcher": _replica(job, 1, launcher),
            "Worker": _replica(job, job.nodes, worker),
        },
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": metadata(job), "spec": spec}]


def _volcano_job(job: Job) -> list[dict[str, Any]]:
    """Volcano: all pods start together; its plugins env and svc set VC_TASK_INDEX and give pods names."""
    task = "node"
    address = {"MASTER_ADDR": f"{job.name}-{task}-0.{job.name}", "MASTER_PORT": _port(job)}
    command = node_command(job, ['export NODE_RANK="$VC_TASK_INDEX"'])
    about = metadata(job)
    labels = {name: value for name, value in about["labels"].items() if name != QUEUE_LABEL}  # the queue is Volcano's
    template = {"metadata": pod_metadata(job, labels), "spec": pod_spec(job, "megaswift", command, address)}
    queue = {"queue": str(job.cluster.get("queue"))} if job.cluster.get("queue") else {}
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        **queue,
        "minAvailable": job.nodes,
        "maxRetry": job.cluster.get("retries"),
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
        "policies": [  # the first that matches is taken: a mistake would end the same again
            *({"exitCode": code, "action": "TerminateJob"} for code in EXPLAINED),
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [{"name": task, "replicas": job.nodes, "template": template}],
    }
    return [
        {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": {**about, "labels": labels},
            "spec": spec,
        }
    ]


_KINDS = {
    "job": _indexed_job,
    "trainjob": _train_job,
    "pytorchjob": _pytorch_job,
    "mpijob": _mpi_job,
    "volcano": _volcano_job,
}
SCHEDULER = KubernetesScheduler()
