"""Granite 3: factors on embeddings, attention scores, residual branches and logits. https://huggingface.co/ibm-granite."""

from __future__ import annotations

from megaswift.families.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp
from megaswift.families.config_dense import GRANITE
from megaswift.families.config_tables import BIASES, FFN, head_dim, kv_heads, rope
from megaswift.families.family import FAMILIES, Family

FAMILIES.register("granite", Family(
    name="granite",
    architecture="GraniteForCausalLM",
    config=(FFN, head_dim(), kv_heads(required=False), rope(), BIASES, *GRANITE),
    weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
))
