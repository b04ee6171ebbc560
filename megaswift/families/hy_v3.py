"""Hy3: norms on each head's query and key, experts chosen by biased sigmoids beside a shared one, after a dense layer.
https://huggingface.co/tencent/Hy3-preview."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, NO_ATTENTION_BIAS, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.deepseek import (
    PRETRAINING,
    RouterDefaults,
    mtp_tensor_name_regex,
    routed_experts_row,
)
from megaswift.models.fields.rows import FieldGroupRow, MappedField, RequiredValue, UnusedField
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
    best=1,
    bias=True,
    first_dense=1,
    shared=1,
    scaling=2.826,
    normalized=True,
    layer_types=True,
    dense_count_read=False,
    names={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
)
CONSTANT = ("norm_topk_prob", "n_group")
"""Fields of other routers that transformers' class for this model does not read; rows of their own require the values
that it computes with."""
EXPERTS = routed_experts_row(ROUTER)

FAMILIES.register(
    "hy_v3",
    Family(
        name="hy_v3",
        architecture="HYV3ForCausalLM",
        config=(
            FFN,
            MappedField("initializer_range", "init_method_std", float, 0.006),
            head_dim_row(128),
            kv_heads_row(),
            rope_row(11_158_840.0),
            NO_ATTENTION_BIAS,
            RequiredValue("mlp_bias", (False,), "Megatron's experts have none"),
            RequiredValue("qk_norm", (True,), "transformers' model has norms on queries and keys"),
            FieldGroupRow(tuple(key for key in EXPERTS.keys if key not in CONSTANT), EXPERTS.read),
            RequiredValue("moe_router_use_sigmoid", (True,), "transformers' router scores by sigmoids"),
            RequiredValue("moe_router_enable_expert_bias", (True,), "transformers' router chooses by biased scores"),
            RequiredValue("route_norm", (True,), "transformers' model scales the chosen experts' weights to 1"),
            RequiredValue("norm_topk_prob", (True,), "transformers' model scales the chosen experts' weights to 1"),
            RequiredValue("n_group", (1,), "transformers' router has no groups"),
            UnusedField(("expert_hidden_dim",), "transformers' model reads moe_intermediate_size"),
            UnusedField(
                ("enable_attention_fp32_softmax", "enable_lm_head_fp32"), "transformers' model does not read them"
            ),
            UnusedField(
                ("enable_moe_fp32_combine",),
                "the sum of routed and shared experts, rounded once, is the same in float32",
            ),
            UnusedField(("use_grouped_mm",), "a setting of how transformers runs the model"),
            UnusedField(("eod_token_id",), "determined by the tokenizer"),
            *PRETRAINING,
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj", router="router.gate"),
            expert_bias("mlp.expert_bias"),
            *shared_experts("shared_mlp"),
            *HEAD,
        ),
        fixed={"qk_layernorm": True},
        kept=mtp_tensor_name_regex,
        renamed_modules=("shared_mlp",),
        unreadable=(null_kv_heads,),
    ),
)
