"""DeepSeek-V2 and V2-Lite: latent attention, experts chosen by softmax, with or without groups.
https://arxiv.org/abs/2405.04434."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, remote_code_row, rope_row
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.latent import LATENT
from megaswift.models.fields.rows import RequiredValue
from megaswift.models.weights.blocks import EMBEDDING, HEAD, dense_mlp, moe_block, shared_experts
from megaswift.models.weights.latent import LATENT_ATTENTION

FAMILIES.register(
    "deepseek_v2",
    Family(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        config=(
            FFN,
            rope_row(),
            *LATENT,
            routed_experts_row(
                RouterDefaults(
                    "softmax",
                    best=1,
                    bias=False,
                    first_dense=0,
                    shared=2,
                    scaling=1.0,
                    normalized=False,
                    method="greedy",
                    normalization_read=False,
                )
            ),
            RequiredValue("scoring_func", ("softmax",), "the router's scores"),
            RequiredValue("topk_method", ("greedy", "group_limited_greedy"), "how experts are chosen"),
            RequiredValue(
                "mlp_bias",
                (False,),
                "Megatron has a single switch for the biases of attention and MLP, and its latent attention has none",
            ),
            *PRETRAINING,
            remote_code_row("deepseek"),
        ),
        weights=(
            *EMBEDDING,
            *LATENT_ATTENTION,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        fixed={"multi_latent_attention": True, "qk_layernorm": True, "latent_pairs": True},
    ),
)
