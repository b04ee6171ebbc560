"""Ministral 3 and Devstral 2: Mistral with yarn, and a factor on queries that grows with the position.
https://huggingface.co/mistralai."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    FFN,
    head_dim_row,
    kv_heads_row,
    padding_token_row,
    scaled_queries_row,
    window_row,
)
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Transformers' parameters where a file has none."""

FAMILIES.register(
    "ministral3",
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        config=(
            FFN,
            padding_token_row(11),
            head_dim_row(128),
            kv_heads_row(),
            scaled_queries_row(YARN),
            window_row(None),
            RequiredValue("attention_bias", (False,), "transformers' model has none"),
            RequiredValue("mlp_bias", (False,), "transformers' model has none"),
            UnusedField(("layer_types",), "transformers' model has one window for all layers"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
        unreadable=(null_kv_heads,),
    ),
)
