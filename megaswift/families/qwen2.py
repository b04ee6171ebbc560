"""Qwen2 and Qwen2.5: biases on query, key and value. https://arxiv.org/abs/2407.10671."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import RequiredValue
from megaswift.models.fields.windows import WINDOW_BY_LAYER
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "qwen2",
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(),
            rope_row(),
            WINDOW_BY_LAYER,
            RequiredValue("use_mrope", (False,), "of vision models"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
        fixed={"add_qkv_bias": True},
    ),
)
