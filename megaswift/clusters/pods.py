"""Parts of Kubernetes manifests that every kind of job shares: the pod, its volumes, variables and resources.

Values stand in the manifest as data: a YAML library writes it, and `$`, which the kubelet itself would read in commands
and variables, is escaped. Other fields are not expanded, and stand as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megaswift.clusters.job import RUN_FILE, Job
from megaswift.clusters.shell_lines import shell_words

RUN_FOLDER = "/etc/megaswift"
"""Where the configuration is mounted."""
RUN_VOLUME = "megaswift-run"
SHARED_MEMORY = "megaswift-shm"
RDMA_NETWORKS = ("infiniband", "roce")
RDMA_DEVICE = "rdma/ib"
IPC_LOCK = "IPC_LOCK"
MERGED_BY = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
"""Lists of a pod whose items a patch merges, and what tells the items apart (Kubernetes' patchMergeKey)."""
SAVE_SECONDS = 600
"""That a pod gets for saving after SIGTERM."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
NODE_NAME = {"name": "MEGASWIFT_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
"""A variable with the name of the node on which a pod runs: a GPU with errors is reported with it."""
NAME_LABEL = "app.kubernetes.io/name"
MEGASWIFT = "megaswift"
"""The value of NAME_LABEL on everything that `megaswift submit` creates."""
INSTANCE_LABEL = "app.kubernetes.io/instance"
"""The label that holds the job's name on its resources and pods."""


class _ManifestDumper(yaml.SafeDumper):
    """No aliases, which are hard to read, and blocks of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _text)


def manifest_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """The YAML of a manifest."""
    return yaml.dump_all(documents, Dumper=_ManifestDumper, sort_keys=False, width=120, allow_unicode=True)


def unexpanded(text: str) -> str:
    """The text so that the kubelet gives it to the container as it is.

    In command, args and the values of variables the kubelet turns `$$` into `$` and `$(NAME)` into the variable's
    value, and it breaks a character of several bytes behind a single `$`.
    """
    return text.replace("$", "$$")


def run_config_map(job: Job) -> dict[str, Any]:
    """The configuration file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{job.name}-run",
            "namespace": job.cluster.get("namespace"),
            "labels": {NAME_LABEL: MEGASWIFT, INSTANCE_LABEL: job.name},
        },
        "data": {RUN_FILE: job.run_text},
    }


def metadata(job: Job) -> dict[str, Any]:
    """Name, namespace, labels."""
    queue = job.cluster.get("queue")
    labels = {NAME_LABEL: MEGASWIFT, INSTANCE_LABEL: job.name}
    labels |= {QUEUE_LABEL: str(queue)} if queue else {}
    return {"name": job.name, "namespace": job.cluster.get("namespace"), "labels": labels}


def pod_metadata(job: Job, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The label by which `megaswift jobs` finds the pods, or these labels; the cluster's annotations."""
    made: dict[str, Any] = {"labels": dict(labels or {INSTANCE_LABEL: job.name})}
    if annotations := job.cluster.get("annotations"):
        made["annotations"] = {str(name): scalar_text(value) for name, value in annotations.items()}
    return made


def scalar_text(value: Any) -> str:
    """As YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def node_command(job: Job, lines: Sequence[str], end: str | None = None) -> list[str]:
    """bash with the cluster's setup, `lines`, and the run in its own place."""
    setup = [str(line) for line in job.cluster.get("setup") or ()]
    workdir = [f"mkdir -p -- {shell_words([job.workdir])}", f"cd -- {shell_words([job.workdir])} || exit 1"]
    run = end or f"exec {shell_words(job.command(f'{RUN_FOLDER}/{RUN_FILE}'))}"
    return ["bash", "-c", unexpanded("\n".join([*workdir, *setup, *lines, run]))]


def environment(job: Job, more: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Variables, and references to the cluster's secrets."""
    made: list[dict[str, Any]] = [
        {"name": name, "value": unexpanded(value)} for name, value in {**job.environment(), **(more or {})}.items()
    ]
    for name, place in (job.cluster.get("secrets") or {}).items():
        secret, _, key = str(place).partition("/")
        made.append({"name": str(name), "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return made


def names_device(job: Job) -> bool:
    """Whether the pods can reach RDMA devices: by a resource of the cluster's own name, or as they are privileged."""
    is_privileged = (job.cluster.get("security_context") or {}).get("privileged") is True
    return is_privileged or any("/" in str(name) for name in job.cluster.get("resources") or ())


def asks_for_default_device(job: Job) -> bool:
    """Whether the manifest asks for `RDMA_DEVICE`."""
    return job.cluster.get("network") == "infiniband" and not names_device(job)


def security_context(job: Job) -> dict[str, Any]:
    """Returns the security context of the run's container. RDMA locks the memory that it registers, which takes the
    capability IPC_LOCK."""
    made = dict(job.cluster.get("security_context") or {})
    capabilities = dict(made.get("capabilities") or {})
    added = list(capabilities.get("add") or ())
    if job.cluster.get("network") in RDMA_NETWORKS and not {"ALL", IPC_LOCK} & set(map(str, added)):
        made["capabilities"] = {**capabilities, "add": [*added, IPC_LOCK]}
    return made


def resources(job: Job) -> dict[str, Any]:
    """Requests and limits of a node; GPUs and other devices must be limits."""
    wanted: dict[str, str] = {str(k): str(v) for k, v in (job.cluster.get("resources") or {}).items()}
    gpu = str(job.cluster.get("gpu_resource"))
    if job.gpus_per_node:
        wanted[gpu] = str(job.gpus_per_node)
    if asks_for_default_device(job):
        wanted[RDMA_DEVICE] = "1"
    for option, name in (("cpus_per_node", "cpu"), ("memory_per_node", "memory")):
        if (value := job.cluster.get(option)) is not None:
            wanted[name] = str(value)
    return {"requests": wanted, "limits": dict(wanted)} if wanted else {}


def volumes(job: Job) -> list[dict[str, Any]]:
    """The configuration, shared memory for NCCL and data loaders, the cluster's mounts."""
    made: list[dict[str, Any]] = [
        {"name": RUN_VOLUME, "configMap": {"name": f"{job.name}-run"}},
        {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": str(job.cluster.get("shared_memory"))}},
    ]
    for i, mount in enumerate(job.cluster.get("mounts") or ()):
        made.append({"name": f"mount-{i}", **_volume_source(mount)})
    return made


def volume_mounts(job: Job) -> list[dict[str, Any]]:
    """Returns the mounts of the container, in the order of `volumes`."""
    made: list[dict[str, Any]] = [
        {"name": RUN_VOLUME, "mountPath": RUN_FOLDER, "readOnly": True},
        {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
    ]
    for i, mount in enumerate(job.cluster.get("mounts") or ()):
        read_only = {"readOnly": True} if mount.get("read_only") else {}
        made.append({"name": f"mount-{i}", "mountPath": str(mount["path"]), **read_only})
    return made


def _volume_source(mount: Mapping[str, Any]) -> dict[str, Any]:
    if "claim" in mount:
        return {"persistentVolumeClaim": {"claimName": str(mount["claim"])}}
    if "host_path" in mount:
        return {"hostPath": {"path": str(mount["host_path"])}}
    return {"configMap": {"name": str(mount["config_map"])}}


def placement(job: Job) -> dict[str, Any]:
    """What a pod says about where it may run and who it is."""
    cluster = job.cluster
    made: dict[str, Any] = {"terminationGracePeriodSeconds": SAVE_SECONDS}
    if selector := cluster.get("node_selector"):
        made["nodeSelector"] = {str(k): str(v) for k, v in selector.items()}
    if tolerations := cluster.get("tolerations"):
        made["tolerations"] = [dict(t) for t in tolerations]
    if account := cluster.get("service_account"):
        made["serviceAccountName"] = str(account)
    if secrets := cluster.get("image_pull_secrets"):
        made["imagePullSecrets"] = [{"name": str(name)} for name in secrets]
    return made


def pod_spec(job: Job, container: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A pod with one container."""
    needed = resources(job)
    security = security_context(job)
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        **placement(job),
        "containers": [
            {
                "name": container,
                "image": str(job.cluster.get("image")),
                "command": list(command),
                "env": [*environment(job, more), NODE_NAME],
                **({"resources": needed} if needed else {}),
                **({"securityContext": security} if security else {}),
                "volumeMounts": volume_mounts(job),
            }
        ],
        "volumes": volumes(job),
    }
    if job.cluster.get("host_network"):
        made |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return patched_pod(job, made)


def patched_pod(job: Job, pod: dict[str, Any]) -> dict[str, Any]:
    """The spec of a pod with the cluster's `pod_patch`, merged as `kubectl patch` does.

    A container of the patch without a name is the run's, whose name differs between kinds.
    """
    patch = dict(job.cluster.get("pod_patch") or {})
    if isinstance(patch.get("containers"), list):
        own = pod["containers"][0]["name"]
        patch["containers"] = [{"name": own, **container} for container in patch["containers"]]
    made: dict[str, Any] = _merged(pod, patch)
    return made


def _merged(value: Any, patch: Any, field: str = "") -> Any:
    if isinstance(value, Mapping) and isinstance(patch, Mapping):
        made = {name: item for name, item in value.items() if name not in patch or patch[name] is not None}
        for name, item in patch.items():
            if item is not None:
                made[name] = _merged(made.get(name), item, name)
        return made
    key = MERGED_BY.get(field)
    if key is None or not isinstance(value, list) or not isinstance(patch, list):
        return patch
    items = list(value)
    for item in patch:
        same = next((i for i, known in enumerate(items) if known.get(key) == item.get(key)), None)
        if same is None:
            items.append(item)
        else:
            items[same] = _merged(items[same], item)
    return items
