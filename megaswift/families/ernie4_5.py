"""ERNIE 4.5, dense (0.3B): whole heads rotated in neighbouring pairs, tied embeddings. https://github.com/PaddlePaddle/ERNIE."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, remote_code_row
from megaswift.models.fields.ernie import ERNIE
from megaswift.models.fields.rows import MappedField
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp

FAMILIES.register(
    "ernie4_5",
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        earlier_architecture="Ernie4_5_ForCausalLM",
        config=(
            FFN,
            head_dim_row(128),
            *ERNIE,
            MappedField("use_bias", "add_bias_linear", bool, False),
            remote_code_row("ernie4_5"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
        fixed={"rotary_interleaved": True},
    ),
)
