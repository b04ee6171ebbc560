"""OLMo 3: OLMo 2 with three windowed layers for each full layer; only full layers have their rotary embedding scaled.

https://allenai.org/olmo.
"""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, NO_ATTENTION_BIAS, head_dim_row, kv_heads_row, padding_token_row
from megaswift.models.fields.gemma import two_ropes_row, windowed_except_every_nth_layer
from megaswift.models.fields.windows import windows_by_layer_row
from megaswift.models.weights.blocks import EMBEDDING, HEAD, PROJECTIONS, QK_NORM_WIDE, dense_mlp, post_norms

FAMILIES.register(
    "olmo3",
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        config=(
            FFN,
            padding_token_row(1),
            head_dim_row(),
            kv_heads_row(required=False),
            two_ropes_row(5e5, 5e5),
            windows_by_layer_row(windowed_except_every_nth_layer(4), 4096),
            NO_ATTENTION_BIAS,
        ),
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
