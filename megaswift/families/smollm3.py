"""SmolLM3: every fourth layer without rotary embedding (NoPE, arXiv:2501.18795), tied embeddings."""

from __future__ import annotations

from megaswift.families.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp
from megaswift.families.config_dense import SMOLLM3
from megaswift.families.config_tables import BIASES, FFN, head_dim, kv_heads, rope
from megaswift.families.family import FAMILIES, Family

FAMILIES.register("smollm3", Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    config=(FFN, head_dim(), kv_heads(), rope(2e6), BIASES, *SMOLLM3),
    weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
))
