"""DeepSeekMoE 16B, the first generation: attention as in Llama, experts chosen by softmax beside shared ones.
https://arxiv.org/abs/2401.06066."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import BIASES, FFN, head_dim_row, kv_heads_row, remote_code_row, rope_row
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.rows import RequiredValue
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp, moe_block, shared_experts

ROUTER = RouterDefaults(
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

FAMILIES.register(
    "deepseek",
    Family(
        name="deepseek",
        architecture="DeepseekForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(required=False),
            rope_row(),
            BIASES,
            routed_experts_row(ROUTER),
            RequiredValue("scoring_func", ("softmax",), "the router's scores"),
            RequiredValue("topk_method", ("greedy",), "how experts are chosen"),
            RequiredValue("pretraining_tp", (1,), "other values change the order of summation"),
            *PRETRAINING,
            remote_code_row("deepseek"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            *shared_experts("shared_experts"),
            *HEAD,
        ),
    ),
)
