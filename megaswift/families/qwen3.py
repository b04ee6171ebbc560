"""Qwen3, dense: norms on each head's query and key, heads of explicit width. https://arxiv.org/abs/2505.09388."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, NO_ATTENTION_BIAS, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.windows import WINDOW_BY_LAYER
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM, dense_mlp

FAMILIES.register(
    "qwen3",
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        config=(FFN, head_dim_row(128), kv_heads_row(), rope_row(), WINDOW_BY_LAYER, NO_ATTENTION_BIAS),
        weights=(*EMBEDDING, *ATTENTION, *QK_NORM, *dense_mlp(), *HEAD),
        fixed={"qk_layernorm": True},
    ),
)
