"""Mistral 7B: Llama with a sliding window in the first version. https://arxiv.org/abs/2310.06825."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, rope_row, window_row
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "mistral",
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        config=(FFN, head_dim_row(), kv_heads_row(), rope_row(), window_row(4096)),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
        unreadable=(null_kv_heads,),
    ),
)
