"""Qwen3 with mixtures of experts in all or some layers. https://arxiv.org/abs/2505.09388."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    FFN,
    NO_ATTENTION_BIAS,
    ROUTER,
    SPARSE_STEP,
    WINDOW_SWITCHED,
    head_dim_row,
    kv_heads_row,
    rope_row,
)
from megaswift.models.fields.rows import MappedField, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM, dense_mlp, moe_block

FAMILIES.register(
    "qwen3_moe",
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(),
            rope_row(),
            WINDOW_SWITCHED,
            NO_ATTENTION_BIAS,
            MappedField("moe_intermediate_size", "moe_ffn_hidden_size", int),
            *ROUTER,
            *SPARSE_STEP,
            UnusedField(("max_window_layers",), "transformers' model uses windows in all layers or in none"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            *HEAD,
        ),
        fixed={"qk_layernorm": True},
        unreadable=(null_kv_heads,),
    ),
)
