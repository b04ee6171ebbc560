"""Published schemas of Kubernetes resources, read from a folder, and what a manifest has that they do not allow.

Reads CustomResourceDefinitions (.yaml), and Kubernetes' own OpenAPI files (.json): version 3 by group
(`apis__batch__v1_openapi.json`, `api__v1_openapi.json`) or version 2 of all groups (`swagger.json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


@dataclass(frozen=True)
class Schema:
    """Of one kind in one release."""

    file: str
    root: Mapping[str, Any]
    definitions: Mapping[str, Any] = field(default_factory=dict)
    """What `$ref` names by its last part."""

    def beyond(self, document: Mapping[str, Any]) -> list[str]:
        """Places where a document goes beyond the schema: unknown fields, missing ones, other types or values."""
        return [f"{self.file}: {found}" for found in self._beyond(document, self.root, "")]

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without `$ref`, and with the parts of `allOf` in one mapping."""
        if reference := schema.get("$ref"):
            return self._resolved(self.definitions[reference.rpartition("/")[2]])
        merged: dict[str, Any] = {name: value for name, value in schema.items() if name != "allOf"}
        for part in schema.get("allOf", ()):
            for name, value in self._resolved(part).items():
                known = merged.get(name)
                merged[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        return merged

    def _beyond(self, value: Any, given: Mapping[str, Any], place: str) -> Iterator[str]:
        schema = self._resolved(given)
        if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
            return
        kind = schema.get("type")
        kinds = [kind] if kind else [one["type"] for one in schema.get("oneOf", ()) if "type" in one]
        if kinds and not any(_is(value, one) for one in kinds):
            yield f"{place}: {type(value).__name__}, not {' or '.join(kinds)}"
        elif isinstance(value, dict):
            yield from self._beyond_mapping(value, schema, place)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield from self._beyond(item, schema.get("items", {}), f"{place}[{i}]")
        if "enum" in schema and value not in schema["enum"]:
            yield f"{place}: {value} is not one of {schema['enum']}"

    def _beyond_mapping(self, value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
        known, free = schema.get("properties", {}), schema.get("additionalProperties")
        # A CRD leaves `metadata` to Kubernetes.
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or (place == ".metadata" and not known)
        yield from (f"{place}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            inner = known.get(name, free)
            if isinstance(inner, Mapping):
                yield from self._beyond(item, inner, f"{place}.{name}")
            elif not is_open and free is not True:
                yield f"{place}.{name}: unknown"


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


@cache
def published_schemas(folder: Path) -> dict[tuple[str, str], list[Schema]]:
    """(apiVersion, kind) to the schemas of all files in the folder."""
    found: dict[tuple[str, str], list[Schema]] = {}
    for file in sorted(folder.rglob("*.yaml")):
        spec = yaml.CSafeLoader(file.read_text(encoding="utf-8")).get_data()["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found.setdefault(key, []).append(Schema(file.name, version["schema"]["openAPIV3Schema"]))
    for file in sorted(folder.rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if "openapi" not in content and "swagger" not in content:
            continue  # compose-spec.json
        for key, schema in of_openapi(file.name, content):
            found.setdefault(key, []).append(schema)
    return found


def of_openapi(name: str, content: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Schema]]:
    """The kinds of an OpenAPI file."""
    definitions = content.get("definitions") or content["components"]["schemas"]
    for root in definitions.values():
        for kind in root.get("x-kubernetes-group-version-kind", ()):
            group = f"{kind['group']}/" if kind["group"] else ""
            yield (group + kind["version"], kind["kind"]), Schema(name, root, definitions)
