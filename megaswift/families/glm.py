"""GLM-4 9B of 2024: half of each head rotated in neighbouring pairs, gate and up in one tensor.
https://arxiv.org/abs/2406.12793."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.rows import MappedField, RequiredValue
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "glm",
    Family(
        name="glm",
        architecture="GlmForCausalLM",
        config=(
            FFN,
            padding_token_row(151329),
            head_dim_row(128),
            kv_heads_row(),
            rope_row(partial=0.5),
            MappedField("attention_bias", "add_qkv_bias", bool, True),
            RequiredValue("mlp_bias", (False,), "transformers' model has none"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(fused=True), *HEAD),
        fixed={"rotary_interleaved": True},
        unreadable=(null_kv_heads,),
    ),
)
