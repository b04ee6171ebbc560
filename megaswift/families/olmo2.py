"""OLMo 2: norms only after attention and MLP, and over all heads of queries and of keys together.
https://arxiv.org/abs/2501.00656."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    FFN,
    NO_ATTENTION_BIAS,
    head_dim_row,
    kv_heads_row,
    padding_token_row,
    rope_row,
)
from megaswift.models.weights.blocks import EMBEDDING, HEAD, PROJECTIONS, QK_NORM_WIDE, dense_mlp, post_norms

FAMILIES.register(
    "olmo2",
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        config=(FFN, padding_token_row(1), head_dim_row(), kv_heads_row(required=False), rope_row(), NO_ATTENTION_BIAS),
        weights=(
            *EMBEDDING,
            *PROJECTIONS,
            *QK_NORM_WIDE,
            *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
            *dense_mlp(norm=""),
            *HEAD,
        ),
        fixed={"qk_layernorm": True, "qk_norm_width": "all", "pre_norm": False, "post_norm": True},
    ),
)
