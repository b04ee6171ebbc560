"""Manifests for Kubernetes: fields against the tables written from the published schemas, and in the slow tier against
schemas themselves.

Covers: kubernetes_pods. The slow tier reads a folder of CRDs (YAML files with kind CustomResourceDefinition) from
MEGASWIFT_SCHEMAS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.kubernetes_pods import unexpanded
from megaswift.clusters.scheduler_protocol import scheduler_of
from tests.clusters.jobs import job
from tests.clusters.manifest_fields import FIELDS, unknown_fields
from tests.clusters.programs import expanded_by_kubernetes
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


@pytest.mark.parametrize("text", ["$(A)", "$$(A)", "$$$(A)", "a$(A)b$(B)", "$A", "$$", "$"])
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
    ],
)
def test_options_that_do_not_do(options: dict[str, Any], text: str) -> None:
    made = job("kubernetes", **options)
    assert any(text in str(problem) for problem in scheduler_of("kubernetes").problems(made))


@pytest.mark.slow
@pytest.mark.skipif("MEGASWIFT_SCHEMAS" not in os.environ, reason="MEGASWIFT_SCHEMAS is not set (CONTRIBUTING.md)")
@pytest.mark.parametrize("name", MANIFESTS)
def test_against_the_schemas_themselves(name: str) -> None:
    """Every field of a custom resource is in the CRD of a release; one that is not would be refused."""
    checked = 0
    schemas = crds(Path(os.environ["MEGASWIFT_SCHEMAS"]))
    for document in documents(name):
        if releases := schemas.get((document["apiVersion"], document["kind"])):
            found = [list(beyond(document, schema, "")) for schema in releases]
            assert [] in found, found
            checked += 1
    assert checked or name == "kubernetes_job"


@cache
def crds(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(apiVersion, kind) to the schemas of all releases in the folder."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in sorted(folder.rglob("*.yaml")):
        document = yaml.CSafeLoader(file.read_text(encoding="utf-8")).get_data()
        spec = document["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found.setdefault(key, []).append(version["schema"]["openAPIV3Schema"])
    return found


def beyond(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    """Places where a value goes beyond an OpenAPI schema: unknown fields, missing ones, other types or values."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return
    if kind in kinds and not isinstance(value, kinds[kind]):
        yield f"{place}: {type(value).__name__}, not {kind}"
    elif isinstance(value, dict):
        known, free = schema.get("properties", {}), schema.get("additionalProperties")
        open_ = schema.get("x-kubernetes-preserve-unknown-fields") or place == ".metadata"
        yield from (f"{place}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            inner = known.get(name, free)
            if isinstance(inner, dict):
                yield from beyond(item, inner, f"{place}.{name}")
            elif not open_:
                yield f"{place}.{name}: unknown"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from beyond(item, schema.get("items", {}), f"{place}[{i}]")
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value} is not one of {schema['enum']}"
