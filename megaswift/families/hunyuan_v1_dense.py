"""Hunyuan V1, dense (0.5B to 7B): norms on each head's query and key after their rotation, a rotary base times a power
of alpha. https://github.com/Tencent-Hunyuan."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN
from megaswift.models.fields.hunyuan import HUNYUAN, head_dim_given
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, ROTATED_QK_NORM, dense_mlp

FAMILIES.register(
    "hunyuan_v1_dense",
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        config=(
            FFN,
            *HUNYUAN,
            RequiredValue("num_experts", (1,), "the models with experts are of model_type hunyuan_v1_moe"),
            RequiredValue("use_mixed_mlp_moe", (False,), "of models with experts"),
            UnusedField(
                (
                    "moe_drop_tokens",
                    "moe_intermediate_size",
                    "moe_layer_num_skipped",
                    "moe_random_routing_dropped_token",
                    "moe_topk",
                    "norm_topk_prob",
                    "num_shared_expert",
                    "routed_scaling_factor",
                ),
                "of models with experts",
            ),
        ),
        weights=(*EMBEDDING, *ATTENTION, *ROTATED_QK_NORM, *dense_mlp(), *HEAD),
        fixed={"qk_layernorm": True, "qk_norm_rotated": True},
        unreadable=(head_dim_given,),
    ),
)
