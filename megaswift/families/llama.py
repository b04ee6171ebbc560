"""Llama 2 and 3.x (with rope scaling), and the many other models of model_type llama.
https://arxiv.org/abs/2407.21783."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import BIASES, FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "llama",
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(required=False),
            rope_row(),
            BIASES,
            RequiredValue("pretraining_tp", (1,), "other values change the order of summation"),
            UnusedField(("max_sequence_length",), "determined by max_position_embeddings"),
            RequiredValue("rope_interleaved", (False,), "transformers' model rotates the two halves of a head"),
            UnusedField(("is_llama_config", "transformers.js_config"), "for other programs; in SmolLM2's folders"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
    ),
)
