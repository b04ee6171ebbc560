"""The fields that manifests may have, written from the published schemas: nested mappings of names; [..] is a list of
such, a type is a value, `str: type` any names.

Sources: Kubernetes 1.31 API reference (v1, batch/v1), Kubeflow Trainer 2.3 (trainer.kubeflow.org/v1alpha1), Kubeflow
training operator 1.9 (kubeflow.org/v1), MPI operator 0.6 (kubeflow.org/v2beta1), KubeRay 1.4 (ray.io/v1), Volcano 1.12
(batch.volcano.sh/v1alpha1). Only parts
that megaswift may use are here.
"""

from __future__ import annotations

from typing import Any

TEXTS: dict[Any, Any] = {str: str}
ANYTHING = object
"""A part that a user writes."""
META = {"name": str, "namespace": str, "labels": TEXTS, "annotations": TEXTS}
SECRET_KEY = {"name": str, "key": str, "optional": bool}
ENV = [{"name": str, "value": str, "valueFrom": {"secretKeyRef": SECRET_KEY, "fieldRef": {"fieldPath": str}}}]
RESOURCES = {"requests": TEXTS, "limits": TEXTS}
MOUNTS = [{"name": str, "mountPath": str, "readOnly": bool, "subPath": str}]
VOLUMES = [
    {
        "name": str,
        "configMap": {"name": str},
        "emptyDir": {"medium": str, "sizeLimit": str},
        "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
        "hostPath": {"path": str, "type": str},
    }
]
TOLERATIONS = [{"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": int}]
NAMES = [{"name": str}]
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": ENV,
    "resources": RESOURCES,
    "volumeMounts": MOUNTS,
    "ports": [{"name": str, "containerPort": int, "protocol": str}],
    "securityContext": {"capabilities": {"add": [str], "drop": [str]}, "privileged": bool, "runAsUser": int},
}
POD = {
    "securityContext": ANYTHING,
    "affinity": ANYTHING,
    "priorityClassName": str,
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "nodeSelector": TEXTS,
    "tolerations": TOLERATIONS,
    "serviceAccountName": str,
    "imagePullSecrets": NAMES,
    "containers": [CONTAINER],
    "volumes": VOLUMES,
    "hostNetwork": bool,
    "dnsPolicy": str,
    "subdomain": str,
    "hostname": str,
}
TEMPLATE = {"metadata": META, "spec": POD}
CONFIG_MAP = {"apiVersion": str, "kind": str, "metadata": META, "data": TEXTS}
SERVICE = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "clusterIP": str,
        "publishNotReadyAddresses": bool,
        "selector": TEXTS,
        "ports": [{"name": str, "port": int, "targetPort": int, "protocol": str}],
    },
}
POLICY_RULE = {
    "action": str,
    "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
    "onPodConditions": [{"type": str, "status": str}],
}
JOB_SPEC = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [POLICY_RULE]},
    "template": TEMPLATE,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "suspend": bool,
}
JOB = {"apiVersion": str, "kind": str, "metadata": META, "spec": JOB_SPEC}
CONTAINER_PATCH = {"name": str, "env": ENV, "volumeMounts": MOUNTS, "securityContext": CONTAINER["securityContext"]}
POD_PATCH = {
    "affinity": ANYTHING,
    "serviceAccountName": str,
    "nodeSelector": TEXTS,
    "tolerations": TOLERATIONS,
    "imagePullSecrets": NAMES,
    "volumes": VOLUMES,
    "containers": [CONTAINER_PATCH],
}
PATCHED_POD = {"template": {"metadata": META, "spec": {**POD_PATCH, "terminationGracePeriodSeconds": int}}}
RUNTIME_PATCH = {
    "manager": str,
    "trainingRuntimeSpec": {
        "template": {"spec": {"replicatedJobs": [{"name": str, "template": {"spec": PATCHED_POD}}]}}
    },
}
TRAINER = {
    "image": str,
    "command": [str],
    "args": [str],
    "numNodes": int,
    "numProcPerNode": int,
    "env": ENV,
    "resourcesPerNode": RESOURCES,
}
TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "runtimeRef": {"name": str, "kind": str, "apiGroup": str},
        "trainer": TRAINER,
        "runtimePatches": [RUNTIME_PATCH],
        "podTemplateOverrides": [{"targetJobs": NAMES, "metadata": META, "spec": POD_PATCH}],
        "suspend": bool,
    },
}
REPLICA = {"replicas": int, "restartPolicy": str, "template": TEMPLATE}
RUN_POLICY = {"backoffLimit": int, "cleanPodPolicy": str, "suspend": bool}
PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "nprocPerNode": str,
        "runPolicy": RUN_POLICY,
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}
MPI_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "slotsPerWorker": int,
        "runPolicy": RUN_POLICY,
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    },
}
GROUP = {"labels": TEXTS, "rayStartParams": TEXTS, "template": TEMPLATE}
RAY_SPEC = {
    "rayVersion": str,
    "headGroupSpec": GROUP,
    "workerGroupSpecs": [{"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, **GROUP}],
}
RAY_CLUSTER = {"apiVersion": str, "kind": str, "metadata": META, "spec": RAY_SPEC}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "entrypoint": str,
        "clusterSelector": TEXTS,
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "backoffLimit": int,
        "rayClusterSpec": RAY_SPEC,
    },
}
VOLCANO_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": META,
    "spec": {
        "schedulerName": str,
        "queue": str,
        "minAvailable": int,
        "maxRetry": int,
        "plugins": {str: [str]},
        "policies": [{"event": str, "events": [str], "exitCode": int, "action": str, "timeout": str}],
        "tasks": [{"name": str, "replicas": int, "minAvailable": int, "template": TEMPLATE}],
    },
}
FIELDS: dict[tuple[str, str], Any] = {
    ("v1", "ConfigMap"): CONFIG_MAP,
    ("v1", "Service"): SERVICE,
    ("batch/v1", "Job"): JOB,
    ("batch.volcano.sh/v1alpha1", "Job"): VOLCANO_JOB,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
    ("kubeflow.org/v1", "PyTorchJob"): PYTORCH_JOB,
    ("kubeflow.org/v2beta1", "MPIJob"): MPI_JOB,
    ("ray.io/v1", "RayJob"): RAY_JOB,
    ("ray.io/v1", "RayCluster"): RAY_CLUSTER,
}


def unknown_fields(value: Any, table: Any, place: str = "") -> list[str]:
    """Places of fields that are not in the table, and of values of another type."""
    if table is ANYTHING:
        return []
    if isinstance(table, dict):
        if not isinstance(value, dict):
            return [f"{place}: no mapping"]
        if set(table) == {str}:
            return [p for k, v in value.items() for p in unknown_fields(v, table[str], f"{place}.{k}")]
        found = [f"{place}.{name}" for name in value if name not in table]
        return found + [p for k, v in value.items() if k in table for p in unknown_fields(v, table[k], f"{place}.{k}")]
    if isinstance(table, list):
        if not isinstance(value, list):
            return [f"{place}: no list"]
        return [p for i, item in enumerate(value) for p in unknown_fields(item, table[0], f"{place}[{i}]")]
    return [] if type(value) is table else [f"{place}: {type(value).__name__}, not {table.__name__}"]
