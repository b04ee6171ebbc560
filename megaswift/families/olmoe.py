"""OLMoE: experts in every layer, norms over all heads of queries and of keys together.
https://arxiv.org/abs/2409.02060."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    EXPERTS_EVERYWHERE,
    NO_ATTENTION_BIAS,
    NORM_TOPK,
    head_dim_row,
    kv_heads_row,
    padding_token_row,
    rope_row,
)
from megaswift.models.fields.rows import MappedField, RequiredValue, UnusedField
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM_WIDE, moe_block

FAMILIES.register(
    "olmoe",
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        config=(
            padding_token_row(1),
            MappedField("intermediate_size", "moe_ffn_hidden_size", int),
            head_dim_row(),
            kv_heads_row(required=False),
            rope_row(),
            NO_ATTENTION_BIAS,
            MappedField("router_aux_loss_coef", "moe_aux_loss_coeff", float, 0.01),
            NORM_TOPK,
            EXPERTS_EVERYWHERE,
            UnusedField(
                ("output_router_logits",),
                "whether transformers returns them; the auxiliary loss follows its coefficient here",
            ),
            RequiredValue("clip_qkv", (), "Megatron-Core does not clip queries, keys and values"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *QK_NORM_WIDE, *moe_block("mlp", "gate_proj", "up_proj", "down_proj"), *HEAD),
        fixed={"qk_layernorm": True, "qk_norm_width": "all"},
    ),
)
