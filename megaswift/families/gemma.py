"""Gemma, the first generation (2B and 7B): scaled embeddings, GeGLU, norms that multiply by 1 + weight.
arXiv:2403.08295."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.gemma import GEMMA
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "gemma",
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        config=(
            FFN,
            padding_token_row(0),
            head_dim_row(256),
            kv_heads_row(),
            rope_row(),
            *GEMMA,
            RequiredValue(
                "hidden_act", ("gelu", "gelu_pytorch_tanh"), "the gated MLP's activation, gelu by its tanh formula"
            ),
            UnusedField(("hidden_activation",), "transformers' model reads hidden_act"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
        fixed={"layernorm_zero_centered_gamma": True, "activation_func": "gelu_tanh"},
        unreadable=(null_kv_heads,),
    ),
)
