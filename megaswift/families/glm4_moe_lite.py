"""GLM-4.7-Flash: latent attention, experts chosen by biased sigmoids beside a shared one, after a dense layer.
https://huggingface.co/zai-org/GLM-4.7-Flash."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, rope_row
from megaswift.models.fields.deepseek import (
    PRETRAINING,
    RouterDefaults,
    mtp_tensor_name_regex,
    routed_experts_row,
)
from megaswift.models.fields.latent import LATENT
from megaswift.models.fields.rows import MappedField, RequiredValue
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import EMBEDDING, EXPERT_BIAS, HEAD, dense_mlp, moe_block, shared_experts
from megaswift.models.weights.latent import LATENT_ATTENTION
from megaswift.models.weights.mtp import DEEPSEEK_MTP

ROUTER = RouterDefaults(
    "sigmoid",
    best=2,
    bias=True,
    first_dense=1,
    shared=1,
    scaling=1.8,
    normalized=True,
    layer_types=True,
    dense_count_read=False,
)

FAMILIES.register(
    "glm4_moe_lite",
    Family(
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        config=(
            FFN,
            rope_row(),
            *LATENT,
            MappedField("rope_interleave", "latent_pairs", bool, True),
            routed_experts_row(ROUTER),
            RequiredValue("scoring_func", ("sigmoid",), "the router's scores"),
            RequiredValue("topk_method", ("noaux_tc",), "experts are chosen by biased scores, in groups"),
            *PRETRAINING,
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
        unreadable=(null_kv_heads,),
    ),
)
