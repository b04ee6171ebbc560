"""A JSON schema of the configuration file, for editors: all names, aliases included, flat and in sections."""

from __future__ import annotations

from typing import Any

from megaswift.bridge.adapters.options.methods import VARIANTS
from megaswift.config.sections import OPTIONS, SECTION_ALIASES, SECTIONS
from megaswift.options.option import Option
from megaswift.options.tasks import CAUSAL_LM, TASK_TYPES, TASKS
from megaswift.options.values import FALSE, TRUE

_TYPES = {"text": ["string", "integer"], "int": ["integer"], "float": ["number"]}
_LIMITS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum", "below": "exclusiveMaximum"}
_NONE = "^([Nn]one|NONE|[Nn]ull|NULL)?$"
"""Text that unsets a number. In JSON Schema a pattern looks at texts alone, and a minimum at numbers."""
_SWITCH = [word for low in (*TRUE, *FALSE) for word in dict.fromkeys((low, low.capitalize(), low.upper()))]
"""Texts for true and false: YAML 1.2 reads yes, no, on and off as text."""
_TASK = {"enum": list(TASKS), "description": "The task; usually given by the command"}
_TASK_TYPE = {"enum": [CAUSAL_LM, *TASK_TYPES, None], "description": "The task, in runs of sft"}


def config_json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, for files as readers of YAML 1.1 and 1.2 have them."""
    inner: dict[str, Any] = {"rlhf_type": _TASK, "task_type": _TASK_TYPE}
    for option in OPTIONS.values():
        for name in option.names:
            inner[name] = {"$ref": f"#/$defs/{option.name}"}
    properties: dict[str, Any] = {"task": _TASK, **inner}
    for heading in (*SECTIONS, *SECTION_ALIASES):
        section = {"anyOf": [{"$ref": "#/$defs/section"}, {"type": "null"}]}
        properties[heading] = {"anyOf": [inner[heading], *section["anyOf"]]} if heading in inner else section
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
    default = option.default
    kinds = {"list": _list, "numbers": _numbers, "integers": _integers, "map": _map, "bool": _bool}
    description = kinds.get(option.kind, _choice if option.choices else _plain)(option)
    return {"description": text, **description, "default": list(default) if isinstance(default, tuple) else default}


def _plain(option: Option) -> dict[str, Any]:
    """Free text, or a number in its range."""
    if option.kind == "text":
        return {"type": [*_TYPES["text"], *(["null"] if option.optional else [])]}
    description: dict[str, Any] = {"type": [*_TYPES[option.kind], "string", "null"], "pattern": _NONE}
    limits = {word: option.details[key] for key, word in _LIMITS.items() if key in option.details}  # type: ignore[literal-required]
    if option.details.get("fraction"):
        share = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return description | {"type": ["number", "string", "null"], "anyOf": [{"type": "integer", **limits}, share]}
    if unset := option.details.get("unset"):
        return description | {"anyOf": [limits, {"enum": sorted({float(word) for word in unset})}]}
    return description | limits


def _choice(option: Option) -> dict[str, Any]:
    words: list[Any] = [*option.choices, *option.details.get("spellings", {})]
    words += [True, False] if option.switches else []
    words += [None, "none"] if option.optional else []
    words += [*VARIANTS, *TASKS] if option.name == "train_type" else []
    return {"enum": list(dict.fromkeys(words))}


def _bool(option: Option) -> dict[str, Any]:
    return {"anyOf": [{"type": ["boolean", "null"] if option.optional else "boolean"}, {"enum": [*_SWITCH, 0, 1]}]}


def _list(option: Option) -> dict[str, Any]:
    item: dict[str, Any] = {"type": ["string", "integer"]}
    if option.choices:
        item = {"enum": [*option.choices, *option.details.get("spellings", {})]}
    return {"anyOf": [{"type": "array", "items": item}, {"type": ["string", "null"]}]}


def _numbers(option: Option) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": ["number", "string", "null"]}]}


def _integers(option: Option) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": ["integer", "string", "null"]}]}


def _map(option: Option) -> dict[str, Any]:
    value = {"type": ["string", "number", "boolean"]}
    return {"type": ["object", "array", "string", "null"], "additionalProperties": value}
