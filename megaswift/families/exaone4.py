"""EXAONE 4: norms only after attention and MLP; full layers without rotary embedding where others have windows.

https://arxiv.org/abs/2507.11407.
"""

from __future__ import annotations

from megaswift.families.blocks import EMBEDDING, HEAD, PROJECTIONS, QK_NORM, dense_mlp, post_norms
from megaswift.families.config_dense import EXAONE_LAYERS
from megaswift.families.config_tables import FFN, head_dim, kv_heads, rope
from megaswift.families.family import FAMILIES, Family

FAMILIES.register("exaone4", Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    config=(FFN, head_dim(), kv_heads(), rope(), EXAONE_LAYERS),
    weights=(*EMBEDDING, *PROJECTIONS, *QK_NORM, *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
             *dense_mlp(norm=""), *HEAD),
    fixed={"qk_layernorm": True, "pre_norm": False, "post_norm": True},
))
