"""Qwen1.5-MoE and Qwen2-MoE: routed experts, and a shared expert with its own output gate.
https://arxiv.org/abs/2407.10671."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, ROUTER, SPARSE_STEP, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import ConfigReading, MappedField
from megaswift.models.fields.windows import is_even_layer, windows_by_layer_row
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    H,
    M,
    dense_mlp,
    moe_block,
    shared_experts,
)
from megaswift.models.weights.rules import ReplicatedRule


def _windowed(reading: ConfigReading, layer: int) -> bool:
    return is_even_layer(reading, layer) and layer < (reading.get("max_window_layers", int, 28) or 0)


FAMILIES.register(
    "qwen2_moe",
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(),
            rope_row(),
            windows_by_layer_row(_windowed, 4096, switched=True, keys=("max_window_layers",)),
            MappedField("qkv_bias", "add_qkv_bias", bool, True),
            MappedField("moe_intermediate_size", "moe_ffn_hidden_size", int),
            MappedField("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", int),
            *ROUTER,
            *SPARSE_STEP,
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            *shared_experts("shared_expert"),
            ReplicatedRule(
                M + "mlp.shared_experts.gate_weight",
                (H + "mlp.shared_expert_gate.weight",),
                ("one", "hidden_size"),
                "moe",
            ),
            *HEAD,
        ),
        fixed={"moe_shared_expert_gate": True},
        unreadable=(null_kv_heads,),
    ),
)
