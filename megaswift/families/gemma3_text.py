"""Gemma 3, text: norms on queries and keys, five windowed layers to a full one, each kind with its own rotary base.

https://arxiv.org/abs/2503.19786. The models with images (`gemma3`) hold this one inside; they are refused.
"""

from __future__ import annotations

from megaswift.families.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM, dense_mlp, post_norms
from megaswift.families.config_dense import GEMMA, GEMMA3_LAYERS, softcaps, two_ropes
from megaswift.families.config_tables import FFN, head_dim, kv_heads
from megaswift.families.family import FAMILIES, Family

FAMILIES.register("gemma3_text", Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=(
        FFN, head_dim(256), kv_heads(), two_ropes(1e6, 1e4), *GEMMA, softcaps(None, None),
        GEMMA3_LAYERS,
    ),
    weights=(*EMBEDDING, *ATTENTION, *QK_NORM, *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
             *dense_mlp(norm="pre_feedforward_layernorm"), *HEAD),
    fixed={"layernorm_zero_centered_gamma": True, "activation_func": "gelu_tanh", "post_norm": True, "qk_layernorm": True},
))
