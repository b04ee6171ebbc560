"""Configuration rows of models that mix attention with gated delta nets (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megaswift.models.fields.decoder import (
    NO_ATTENTION_BIAS,
    ROUTER,
    head_dim_row,
    kv_heads_row,
    rope_row,
)
from megaswift.models.fields.rows import (
    ConfigReading,
    ConfigRow,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)
from megaswift.models.spec import ModelSpec

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"
MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved")
"""Which frequencies turn by which axis of an image: a text's tokens have the same position on all of them."""
LINEAR_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
USUAL_SIZES = (16, 32, 128, 128, 4)
"""Where config.json has none: the defaults of transformers' classes."""
ROPE = rope_row(partial=0.25)


def _sizes(reading: ConfigReading) -> None:
    for name, usual in zip(LINEAR_SIZES, USUAL_SIZES, strict=True):
        reading.values[f"linear_{name}"] = reading.get(f"linear_{name}", int, usual, 1)
    keys, values = (reading.values[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    if keys and values and values % keys:
        reading.problem("linear_num_value_heads", f"must be a multiple of linear_num_key_heads {keys}")


def _layers(reading: ConfigReading) -> None:
    layers = reading.layers()
    every = reading.get("full_attention_interval", int, 4, 1)
    kinds = reading.raw.get("layer_types")
    if layers is None or every is None:
        return
    if kinds is None:
        kinds = [LINEAR_ATTENTION if (layer + 1) % every else FULL_ATTENTION for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {LINEAR_ATTENTION, FULL_ATTENTION}:
        rule = f"must have {layers} entries, each {LINEAR_ATTENTION} or {FULL_ATTENTION}"
        reading.problem("layer_types", rule)
        return
    reading.values["linear_layers"] = tuple(kind == LINEAR_ATTENTION for kind in kinds)


def _rope(reading: ConfigReading) -> None:
    raw = dict(reading.raw)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(raw.get(key), dict):
            raw[key] = {k: v for k, v in raw[key].items() if k not in MULTIMODAL_ROPE}
    ROPE.read(ConfigReading(reading.family, raw, reading.problems, reading.values))


HYBRID: tuple[ConfigRow, ...] = (
    head_dim_row(256),
    kv_heads_row(),
    NO_ATTENTION_BIAS,
    FieldGroupRow(ROPE.keys, _rope),
    FieldGroupRow(tuple(f"linear_{name}" for name in LINEAR_SIZES), _sizes),
    FieldGroupRow(("layer_types", "full_attention_interval"), _layers),
    RequiredValue("attn_output_gate", (True,), "transformers' model gates attention"),
    RequiredValue("output_gate_type", ("swish", "silu"), "the gate of transformers' gated delta nets"),
    RequiredValue("mtp_use_dedicated_embeddings", (False,), "multi-token prediction shares the model's embedding"),
    UnusedField(("mtp_num_hidden_layers",), "how many layers for multi-token prediction are kept unchanged"),
    UnusedField(("mamba_ssm_dtype",), "the states of gated delta nets are float32 in any case"),
)
"""Attention with output gates and gated delta nets; dense MLPs and experts are a family's own."""
HYBRID_FIXED: Mapping[str, Any] = MappingProxyType(
    {"qk_layernorm": True, "attention_output_gate": True, "layernorm_zero_centered_gamma": True}
)
EXPERTS: tuple[ConfigRow, ...] = (
    MappedField("moe_intermediate_size", "moe_ffn_hidden_size", int),
    MappedField("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", int),
    *ROUTER,
)


def mtp_tensor_names(_: ModelSpec) -> str:
    """Return a pattern of the names of the tensors of multi-token prediction."""
    return r"mtp\..*"
