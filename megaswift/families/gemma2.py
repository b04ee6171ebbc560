"""Gemma 2: soft caps on attention scores and logits, a window in every other layer, norms before and after.
arXiv:2408.00118."""

from __future__ import annotations

from megaswift.families.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp, post_norms
from megaswift.families.config_common import FFN, head_dim, kv_heads, rope
from megaswift.families.config_dense import GEMMA, softcaps
from megaswift.families.config_rows import UnusedField
from megaswift.families.config_windows import alternating_windows, every_other
from megaswift.families.family import FAMILIES, Family

FAMILIES.register(
    "gemma2",
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        config=(
            FFN,
            head_dim(256),
            kv_heads(),
            rope(),
            alternating_windows(every_other, 4096),
            *GEMMA,
            softcaps(50.0, 30.0),
            UnusedField(("sliding_window_size",), "transformers' model reads sliding_window"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
            *dense_mlp(norm="pre_feedforward_layernorm"),
            *HEAD,
        ),
        fixed={"layernorm_zero_centered_gamma": True, "activation_func": "gelu_tanh", "post_norm": True},
    ),
)
