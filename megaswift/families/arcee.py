"""Arcee's AFM-4.5B: Llama with squared ReLU in place of a gated MLP. https://huggingface.co/arcee-ai."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import BIASES, FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, ungated_mlp

FAMILIES.register(
    "arcee",
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(required=False),
            rope_row(),
            BIASES,
            RequiredValue("hidden_act", ("relu2",), "the activation of the MLP"),
            UnusedField(("pretraining_tp",), "transformers' model does not read it"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *ungated_mlp(), *HEAD),
        fixed={"gated_linear_unit": False, "activation_func": "relu2"},
    ),
)
