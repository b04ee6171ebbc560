"""Values of config.json that transformers does not read: its configuration class, which tokenizers use too, or its
model raises an error of Python's. A family's declaration lists the checks that apply to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from megaswift.errors import Problem

UnreadableCheck = Callable[[Mapping[str, Any]], Problem | None]
"""Takes a config.json; returns the problem of its value, or None."""


def unreadable_value(raw: Mapping[str, Any], key: str, rule: str, fix: str) -> Problem:
    """The problem of the value of `key`."""
    return Problem(f"config.json ({raw.get('model_type')}), {key} {json.dumps(raw.get(key))}", rule, fix)


def null_kv_heads(raw: Mapping[str, Any]) -> Problem | None:
    """`num_key_value_heads` null, in families where transformers 5 does not take it for the number of heads."""
    if raw.get("num_key_value_heads", 0) is not None:
        return None
    heads = raw.get("num_attention_heads")
    fix = f'"num_key_value_heads": {heads}, as many as attention heads' if isinstance(heads, int) else ""
    rule = "must be a number: transformers reads no null for this model"
    return unreadable_value(raw, "num_key_value_heads", rule, fix)


def float_query_scalar(raw: Mapping[str, Any]) -> Problem | None:
    """`query_pre_attn_scalar` as a float, in families where transformers wants an integer."""
    scalar = raw.get("query_pre_attn_scalar")
    if not isinstance(scalar, float):
        return None
    fix = f'"query_pre_attn_scalar": {scalar:.0f}' if scalar.is_integer() else ""
    rule = "must be an integer: transformers reads no float there"
    return unreadable_value(raw, "query_pre_attn_scalar", rule, fix)
