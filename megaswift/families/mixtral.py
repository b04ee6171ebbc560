"""Mixtral: a mixture of experts in every layer. https://arxiv.org/abs/2401.04088."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    EXPERTS_EVERYWHERE,
    ROUTER,
    head_dim_row,
    kv_heads_row,
    rope_row,
    window_row,
)
from megaswift.models.fields.rows import MappedField, RequiredValue
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, moe_block

FAMILIES.register(
    "mixtral",
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        config=(
            MappedField("intermediate_size", "moe_ffn_hidden_size", int),
            head_dim_row(),
            kv_heads_row(),
            rope_row(1e6),
            window_row(None),
            *ROUTER,
            EXPERTS_EVERYWHERE,
            RequiredValue(
                "router_jitter_noise",
                (0,),
                "transformers also adds the noise to the experts' inputs, Megatron only to the router's",
            ),
        ),
        weights=(*EMBEDDING, *ATTENTION, *moe_block("block_sparse_moe", "w1", "w3", "w2"), *HEAD),
        fixed={"moe_router_pre_softmax": False},
        unreadable=(null_kv_heads,),
    ),
)
