"""A JSON schema of the configuration file, for editors: all names, aliases included, flat and in sections."""

from __future__ import annotations

from typing import Any

from megaswift.config.option import Option
from megaswift.config.sections import OPTIONS, SECTION_ALIASES, SECTIONS, TASKS

_TYPES = {"text": "string", "int": "integer", "float": "number", "bool": "boolean"}
_LIMITS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum", "below": "exclusiveMaximum"}


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    flat: dict[str, Any] = {
        "task": {"enum": list(TASKS), "description": "The task; given by the command in most cases"}
    }
    for option in OPTIONS.values():
        for name in option.names:
            flat[name] = {"$ref": f"#/$defs/{option.name}"}
    inner = {n: v for n, v in flat.items() if n != "task"}
    properties = dict(flat)
    for heading in (*SECTIONS, *SECTION_ALIASES):
        section = {"$ref": "#/$defs/section"}
        properties[heading] = {"anyOf": [flat[heading], section]} if heading in flat else section
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "megaswift configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {
            **{o.name: _describe(o) for o in OPTIONS.values()},
            "section": {"type": "object", "properties": inner, "additionalProperties": False},
        },
    }


def _describe(option: Option) -> dict[str, Any]:
    text = option.help + (f" [{option.unit}]" if option.unit else "")
    found: dict[str, Any] = {"description": text}
    item: dict[str, Any] = {"type": "string"}
    if option.choices:
        item["enum"] = [*option.choices, *option.details.get("spellings", {})]
    if option.kind == "list":
        found["anyOf"] = [{"type": "array", "items": item}, {"type": "string"}]
    elif option.kind == "numbers":
        found["anyOf"] = [{"type": "array", "items": {"type": "number"}}, {"type": "number"}, {"type": "string"}]
    elif option.kind == "map":
        found.update(type="object", additionalProperties={"type": "string"})
    else:
        found["type"] = _TYPES[option.kind]
        found.update({k: v for k, v in item.items() if k == "enum"})
        found.update({word: option.details[key] for key, word in _LIMITS.items() if key in option.details})  # type: ignore[literal-required]
    if option.optional:
        found["type"] = [found["type"], "null"]
        if "enum" in found:
            found["enum"] = [*found["enum"], None]
    default = option.default
    found["default"] = list(default) if isinstance(default, tuple) else default
    return found
