"""K-EXAONE: windows in most layers and no rotary embedding in the others, experts chosen by biased sigmoids.
https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B."""

from __future__ import annotations

from megaswift.families.exaone4 import EXAONE_LAYERS, computed_layer_types
from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.gated_delta import mtp_tensor_names
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    QK_NORM,
    dense_mlp,
    expert_bias,
    moe_block,
    shared_experts,
)

ROUTER = RouterDefaults(
    "sigmoid",
    best=2,
    bias=True,
    first_dense=1,
    shared=1,
    scaling=2.5,
    normalized=True,
    layer_types=True,
    names={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
)
FAMILIES.register(
    "exaone_moe",
    Family(
        name="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        earlier_architecture="ExaoneMoEForCausalLM",
        config=(
            FFN,
            padding_token_row(0),
            head_dim_row(),
            kv_heads_row(),
            rope_row(),
            EXAONE_LAYERS,
            routed_experts_row(ROUTER),
            RequiredValue("scoring_func", ("sigmoid",), "the router's scores"),
            RequiredValue("topk_method", ("noaux_tc",), "experts are chosen by biased scores, in groups"),
            UnusedField(
                ("is_moe_layer", "first_last_k_dense_replace"),
                "transformers' model has one dense layer unless mlp_layer_types or first_k_dense_replace is given",
            ),
            *PRETRAINING,
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            expert_bias("mlp.e_score_correction_bias"),
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        fixed={"qk_layernorm": True},
        kept=mtp_tensor_names,
        unreadable=(null_kv_heads, computed_layer_types),
    ),
)
