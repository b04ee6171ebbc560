"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: query, key and value in one tensor, gate and up in another.
https://arxiv.org/abs/2404.14219."""

from __future__ import annotations

from typing import Any

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    FFN,
    head_dim_row,
    kv_heads_row,
    padding_token_row,
    remote_code_row,
    rope_row,
    window_row,
)
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow, MappedField, RequiredValue
from megaswift.models.spec import RopeSpec
from megaswift.models.weights.blocks import EMBEDDING, FUSED_ATTENTION, HEAD, dense_mlp

NO_BIAS = "transformers' model has none"
SAME = "transformers' model supports only this value"

_PARTIAL = rope_row(partial=1.0)


def _longrope(reading: ConfigReading) -> None:
    """LongRoPE (arXiv:2402.13753), by its short factors: transformers takes the long ones for a batch with a longer
    sequence.

    So runs up to `original_max_position_embeddings` compute what transformers computes, and longer ones are refused.
    """
    raw = reading.raw
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope_scaling: Any = raw.get(key) or {}
    kind = (
        rope_scaling.get("rope_type", rope_scaling.get("type", "default")) if isinstance(rope_scaling, dict) else None
    )
    if kind not in ("longrope", "su", "yarn"):  # transformers reads the other two as longrope here
        _PARTIAL.read(reading)
        return
    head = {k: v for k, v in rope_scaling.items() if k in ("rope_theta", "partial_rotary_factor")}
    plain = ConfigReading(
        reading.family,
        {**{k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_parameters")}, key: head},
        reading.problems,
        reading.values,
    )
    _PARTIAL.read(plain)
    original = (
        raw.get("original_max_position_embeddings") or rope_scaling.get("original_max_position_embeddings") or 4096
    )
    recognized = (
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "factor",
        "attention_factor",
        "short_factor",
        "long_factor",
    )
    for name in rope_scaling:
        if name not in recognized:
            reading.problem(key, f"{name} is not a parameter of rope type {kind!r}")
    for name in ("short_factor", "long_factor"):
        if not isinstance(rope_scaling.get(name), list):
            reading.problem(key, f"rope type {kind!r} needs the list {name}")
    rope: RopeSpec | None = reading.values.get("rope")
    if rope is not None:
        scaling = {name: rope_scaling[name] for name in recognized[5:] if rope_scaling.get(name) is not None}
        scaling |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        reading.values.update(rope=RopeSpec(rope.base, scaling, rope.partial), longest=original)


LONGROPE = FieldGroupRow((*_PARTIAL.keys, "original_max_position_embeddings"), _longrope)

FAMILIES.register(
    "phi3",
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        config=(
            FFN,
            padding_token_row(32000),
            head_dim_row(),
            kv_heads_row(required=False),
            LONGROPE,
            window_row(None),
            remote_code_row("phi3"),
            MappedField("resid_pdrop", "hidden_dropout", float, 0.0),
            RequiredValue("embd_pdrop", (0,), "transformers' model does not apply it"),
            RequiredValue("attention_bias", (False,), NO_BIAS),
            RequiredValue("mlp_bias", (False,), NO_BIAS),
            RequiredValue("lm_head_bias", (False,), NO_BIAS),
            RequiredValue("full_attn_mod", (1,), SAME),
            RequiredValue("interpolate_factor", (1,), SAME),
        ),
        weights=(*EMBEDDING, *FUSED_ATTENTION, *dense_mlp(fused=True), *HEAD),
    ),
)
