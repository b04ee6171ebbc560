"""GLM-4.5, 4.6 and 4.7: half of each head is rotated, experts after dense layers. https://arxiv.org/abs/2508.06471."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.deepseek import (
    PRETRAINING,
    RouterDefaults,
    mtp_tensor_name_regex,
    routed_experts_row,
)
from megaswift.models.fields.rows import MappedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERT_BIAS,
    HEAD,
    QK_NORM,
    dense_mlp,
    moe_block,
    shared_experts,
)
from megaswift.models.weights.mtp import DEEPSEEK_MTP

FAMILIES.register(
    "glm4_moe",
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(),
            rope_row(partial=0.5),
            MappedField("attention_bias", "add_qkv_bias", bool, False),
            MappedField("use_qk_norm", "qk_layernorm", bool, False),
            routed_experts_row(
                RouterDefaults("sigmoid", best=2, bias=True, first_dense=1, shared=1, scaling=1.0, normalized=True)
            ),
            *PRETRAINING,
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            EXPERT_BIAS,
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        kept=mtp_tensor_name_regex,
        mtp=DEEPSEEK_MTP,
        unreadable=(null_kv_heads,),
    ),
)
