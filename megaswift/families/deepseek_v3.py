"""DeepSeek-V3, V3.1 and R1: latent attention, experts chosen by biased sigmoids in groups.
https://arxiv.org/abs/2412.19437."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, remote_code_row, rope_row
from megaswift.models.fields.deepseek import (
    PRETRAINING,
    RouterDefaults,
    mtp_tensor_name_regex,
    routed_experts_row,
)
from megaswift.models.fields.latent import LATENT
from megaswift.models.fields.rows import MappedField, RequiredValue
from megaswift.models.weights.blocks import EMBEDDING, EXPERT_BIAS, HEAD, dense_mlp, moe_block, shared_experts
from megaswift.models.weights.latent import LATENT_ATTENTION
from megaswift.models.weights.mtp import DEEPSEEK_MTP

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=(
        FFN,
        rope_row(),
        *LATENT,
        MappedField("rope_interleave", "latent_pairs", bool, True),
        routed_experts_row(
            RouterDefaults(
                "sigmoid",
                best=2,
                bias=True,
                first_dense=3,
                shared=1,
                scaling=2.5,
                normalized=True,
                groups=8,
                topk_group=4,
            )
        ),
        RequiredValue("scoring_func", ("sigmoid",), "the router's scores"),
        RequiredValue("topk_method", ("noaux_tc",), "experts are chosen by biased scores, in groups"),
        *PRETRAINING,
        remote_code_row("deepseek"),
    ),
    weights=(
        *EMBEDDING,
        *LATENT_ATTENTION,
        *dense_mlp("dense"),
        *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
        EXPERT_BIAS,
        *shared_experts("shared_experts"),
        *HEAD,
    ),
    fixed={"multi_latent_attention": True, "qk_layernorm": True},
    kept=mtp_tensor_name_regex,
    mtp=DEEPSEEK_MTP,
)
FAMILIES.register("deepseek_v3", DEEPSEEK_V3)
