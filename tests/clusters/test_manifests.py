"""Manifests for Kubernetes: fields against the tables written from the published schemas, and in the slow tier against
schemas themselves.

Covers: kubernetes_pods. The slow tier reads a folder of schemas (`published_schemas`) from MEGASWIFT_SCHEMAS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.pods import unexpanded
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.jobs import job
from tests.clusters.manifest_fields import FIELDS, unknown_fields
from tests.clusters.programs import expanded_by_kubernetes
from tests.clusters.published_schemas import of_openapi, published_schemas
from tests.clusters.test_rendered_files import JOBS

MANIFESTS = [name for name in JOBS if name.startswith(("kubernetes", "rayjob", "raycluster"))]


def documents(name: str) -> list[dict[str, Any]]:
    made = JOBS[name]
    return list(yaml.safe_load_all(scheduler_of(made.cluster.launcher).render(made).files["job.yaml"]))


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_field_is_in_the_schemas_tables(name: str) -> None:
    for document in documents(name):
        assert unknown_fields(document, FIELDS[document["apiVersion"], document["kind"]]) == []


def test_an_unknown_field_or_type_is_found() -> None:
    document = documents("kubernetes_job")[-1]
    document["spec"]["template"]["spec"]["containers"][0]["volumemounts"] = []
    document["spec"]["completions"] = "2"
    assert unknown_fields(document, FIELDS["batch/v1", "Job"]) == [
        ".spec.completions: str, not int",
        ".spec.template.spec.containers[0].volumemounts",
    ]


@pytest.mark.parametrize("name", MANIFESTS)
def test_names_that_refer_to_each_other(name: str) -> None:
    """Volumes that are mounted exist, and the ConfigMap is the one that pods mount."""
    config = next(d for d in documents(name) if d["kind"] == "ConfigMap")
    for pod in pods(documents(name)):
        volumes = {v["name"]: v for v in pod["volumes"]}
        for container in pod["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes)
        assert volumes["megaswift-run"]["configMap"]["name"] == config["metadata"]["name"]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value and "volumes" in value:
            yield value
        for item in value.values():
            yield from pods(item)
    elif isinstance(value, list):
        for item in value:
            yield from pods(item)


def test_gpus_stand_in_the_limits() -> None:
    """Kubernetes takes devices from the limits only."""
    (pod,) = pods(documents("kubernetes_job"))
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    "text", ["$(A)", "$$(A)", "$$$(A)", "a$(A)b$(B)", "$A", "$$x$$", "$$", "$", "$\u00e9$\u4e2d", "$(A", "$()"]
)
def test_kubernetes_expands_nothing_of_ours(text: str) -> None:
    assert expanded_by_kubernetes(unexpanded(text), {"A": "wrong", "B": "wrong"}) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"image": None}, "needs an image"),
        ({"mounts": [{"claim": "a"}]}, "needs path, absolute"),
        ({"mounts": [{"claim": "a", "host_path": "/b", "path": "/c"}]}, "one of claim, host_path"),
        ({"mounts": [{"claim": "a", "path": "/c", "pth": 1}]}, "needs path"),
        ({"secrets": {"HF_TOKEN": "hub"}}, "must be SECRET/KEY"),
        ({"kind": "trainjob", "host_network": True}, "has no place in a TrainJob"),
        ({"kind": "trainjob", "retries": 7}, "failurePolicy: {maxRestarts: 7}"),
        ({"kind": "trainjob", "retries": 0}, "retries: has no place in a TrainJob"),
        ({"kind": "trainjob", "pod_patch": {"hostNetwork": True}}, "pod_patch: hostNetwork: has no place"),
        ({"kind": "trainjob", "pod_patch": {"containers": [{"env": []}]}}, "pod_patch: containers: env: has no place"),
        ({"kind": "trainjob", "trainer_version": "2.1", "security_context": {"privileged": True}}, "Trainer 2.1"),
        ({"pod_patch": {"restartPolicy": "Always"}}, "must leave restartPolicy"),
        ({"pod_patch": {"containers": [{"command": ["x"]}]}}, "must leave restartPolicy, and command"),
        ({"pod_patch": {"containers": {"name": "x"}}}, "must be a list of mappings"),
    ],
)
def test_options_that_do_not_do(options: dict[str, Any], text: str) -> None:
    made = job("kubernetes", **options)
    assert any(text in str(problem) for problem in scheduler_of("kubernetes").problems(made))


SMALL: dict[str, Any] = {
    "openapi": "3.0.0",
    "components": {
        "schemas": {
            "test.Job": {
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "kind": {"type": "string"},
                    "spec": {"allOf": [{"$ref": "#/components/schemas/test.Spec"}]},
                },
                "x-kubernetes-group-version-kind": [{"group": "batch", "kind": "Job", "version": "v1"}],
            },
            "test.Spec": {
                "type": "object",
                "properties": {
                    "mode": {"type": "string", "enum": ["Indexed"]},
                    "count": {"type": "integer"},
                    "size": {"oneOf": [{"type": "string"}, {"type": "number"}]},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "port": {"allOf": [{"$ref": "#/components/schemas/test.IntOrString"}]},
                    "parts": {"type": "array", "items": {"allOf": [{"$ref": "#/components/schemas/test.Part"}]}},
                },
            },
            "test.Part": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            "test.IntOrString": {"type": "string", "format": "int-or-string"},
        }
    },
}
"""As Kubernetes publishes its own kinds: by reference."""


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"mode": "Indexed", "count": 1, "size": 2, "labels": {"a": "b"}, "port": 1, "parts": [{"name": "a"}]}, []),
        ({"mod": "Indexed"}, [".spec.mod: unknown"]),
        ({"mode": "Other"}, [".spec.mode: Other is not one of ['Indexed']"]),
        ({"count": True}, [".spec.count: bool, not integer"]),
        ({"size": []}, [".spec.size: list, not string or number"]),
        ({"labels": {"a": 1}}, [".spec.labels.a: int, not string"]),
        ({"parts": [{"nam": "a"}]}, [".spec.parts[0].name: missing", ".spec.parts[0].nam: unknown"]),
    ],
)
def test_a_schema_with_references(spec: dict[str, Any], found: list[str]) -> None:
    ((key, schema),) = of_openapi("batch.json", SMALL)
    assert key == ("batch/v1", "Job")
    assert schema.beyond({"kind": "Job", "spec": spec}) == [f"batch.json: {text}" for text in found]


needs_schemas = pytest.mark.skipif(
    "MEGASWIFT_SCHEMAS" not in os.environ, reason="MEGASWIFT_SCHEMAS is not set (CONTRIBUTING.md)"
)


def beyond_each_release(document: dict[str, Any]) -> list[list[str]]:
    """What the schemas of a document's kind do not allow, a list for each file of the folder."""
    releases = published_schemas(Path(os.environ["MEGASWIFT_SCHEMAS"]))[document["apiVersion"], document["kind"]]
    return [schema.beyond(document) for schema in releases]


@pytest.mark.slow
@needs_schemas
@pytest.mark.parametrize("name", MANIFESTS)
def test_against_the_schemas_themselves(name: str) -> None:
    """Each document, ConfigMap and Service too, in every release of the folder. A TrainJob is written for one release
    of Kubeflow Trainer, so for it one must do."""
    for document in documents(name):
        found = beyond_each_release(document)
        assert [] in found if document["kind"] == "TrainJob" else not any(found), found


@pytest.mark.slow
@needs_schemas
@pytest.mark.parametrize("name", MANIFESTS)
def test_schemas_refuse_an_unknown_field(name: str) -> None:
    """In the specification and in each container."""
    for document in documents(name):
        document.get("spec", document)["notAField"] = 1
        containers = [container for pod in pods(document) for container in pod["containers"]]
        for container in containers:
            container["volumemounts"] = []
        for found in beyond_each_release(document):
            assert any(text.endswith(".notAField: unknown") for text in found)
            if document["kind"] != "TrainJob":  # another release knows no runtimePatches
                assert sum(text.endswith(".volumemounts: unknown") for text in found) == len(containers)
