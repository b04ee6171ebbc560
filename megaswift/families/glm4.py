"""GLM-4-0414: norms before and after, half of each head rotated in neighbouring pairs, gate and up in one tensor.

https://arxiv.org/abs/2406.12793.
"""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.rows import MappedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp, post_norms

FAMILIES.register(
    "glm4",
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        config=(
            FFN,
            padding_token_row(151329),
            head_dim_row(128),
            kv_heads_row(),
            rope_row(partial=0.5),
            MappedField("attention_bias", "add_qkv_bias", bool, True),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *post_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
            *dense_mlp(fused=True),
            *HEAD,
        ),
        fixed={"rotary_interleaved": True, "post_norm": True},
        unreadable=(null_kv_heads,),
    ),
)
