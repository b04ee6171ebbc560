"""Gemma 2: soft caps on attention scores and logits, a window in every other layer, norms before and after.
arXiv:2408.00118."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.gemma import GEMMA_2_AND_3, softcaps_row
from megaswift.models.fields.rows import UnusedField
from megaswift.models.fields.windows import is_even_layer, windows_by_layer_row
from megaswift.models.unreadable import float_query_scalar, null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp, post_norms

FAMILIES.register(
    "gemma2",
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        config=(
            FFN,
            padding_token_row(0),
            head_dim_row(256),
            kv_heads_row(),
            rope_row(),
            windows_by_layer_row(is_even_layer, 4096),
            *GEMMA_2_AND_3,
            softcaps_row(50.0, 30.0),
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
        unreadable=(null_kv_heads, float_query_scalar),
    ),
)
