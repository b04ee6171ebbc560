"""Hunyuan-A13B: attention as in the dense Hunyuan V1, in every layer experts chosen by softmax beside a shared one.
https://github.com/Tencent-Hunyuan."""

from __future__ import annotations

from typing import Any

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.hunyuan import HUNYUAN, head_dim_given
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow, RequiredValue, UnusedField
from megaswift.models.weights.blocks import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    ROTATED_QK_NORM,
    moe_block,
    shared_experts,
)

EXPERT_KEYS = ("intermediate_size", "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def _same_in_all_layers(reading: ConfigReading, key: str, default: Any) -> Any:
    """A number, or the number that a list has for every layer; None after a problem."""
    given = reading.raw.get(key)
    if not isinstance(given, list):
        return reading.get(key, int, default, 1)
    if len(given) != reading.layers() or len({repr(n) for n in given}) != 1 or not isinstance(given[0], int):
        reading.problem(key, "must have the same number for every layer: Megatron's layers are alike")
        return None
    return given[0]


def _experts(reading: ConfigReading) -> None:
    """Experts in every layer, as wide as the shared one: transformers reads `intermediate_size` for both."""
    layers = reading.layers()
    width = reading.get("intermediate_size", int, least=1)
    experts = reading.get("num_experts", int, least=1)
    topk = _same_in_all_layers(reading, "moe_topk", 1)
    for key, only in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if reading.raw.get(key) is not None and _same_in_all_layers(reading, key, only) not in (only, None):
            reading.problem(
                key, f"must be {only}: transformers' model reads intermediate_size, and has one shared expert"
            )
    if layers is None or width is None or experts is None or topk is None:
        return
    if topk > experts:
        reading.problem("moe_topk", f"is more than the {experts} experts")
    if topk == 1:
        reading.problem(
            "moe_topk", "with one expert per token, normalized weights are 1 and the router gets no gradient"
        )
    reading.values.update(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=width,
        ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width,
        moe_layer_freq=[1] * layers,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="aux_loss",
    )


FAMILIES.register(
    "hunyuan_v1_moe",
    Family(
        name="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        config=(
            *HUNYUAN,
            FieldGroupRow(EXPERT_KEYS, _experts),
            RequiredValue("use_mixed_mlp_moe", (True,), "transformers' model has a shared expert"),
            RequiredValue("moe_layer_num_skipped", (0,), "transformers' model has experts in every layer"),
            RequiredValue("norm_topk_prob", (True,), "transformers' model scales the chosen experts' weights to 1"),
            RequiredValue("routed_scaling_factor", (1, False), "transformers' model has no such factor"),
            UnusedField(
                ("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "output_router_logits"),
                "transformers' model drops no tokens",
            ),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *ROTATED_QK_NORM,
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj", router="gate.wg"),
            *shared_experts("shared_mlp"),
            *HEAD,
        ),
        fixed={"qk_layernorm": True, "qk_norm_rotated": True, "moe_router_pre_softmax": False},
        unreadable=(head_dim_given,),
    ),
)
