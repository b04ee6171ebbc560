"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B): heads rotated in neighbouring pairs, experts chosen by biased softmax.
https://github.com/PaddlePaddle/ERNIE."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, ROUTER, head_dim_row, remote_code_row
from megaswift.models.fields.ernie import ERNIE
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow, RequiredValue, UnusedField
from megaswift.models.spec import ModelSpec
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, H, M, dense_mlp, moe_block, shared_experts
from megaswift.models.weights.rules import OneRowRule

EXPERT_KEYS = (
    "moe_num_experts",
    "moe_k",
    "moe_intermediate_size",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_norm_min",
)


def _experts(reading: ConfigReading) -> None:
    """Experts in every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` (-1: the
    last); without any the model is dense."""
    layers = reading.layers()
    experts = reading.get("moe_num_experts", int, least=1)
    topk = reading.get("moe_k", int, 6, 1)
    width = reading.get("moe_intermediate_size", int, least=1)
    shared = reading.get("moe_num_shared_experts", int, 2)
    start = reading.get("moe_layer_start_index", int, 1)
    end = reading.get("moe_layer_end_index", int, -1, -1)
    interval = reading.get("moe_layer_interval", int, 1, 1)
    if layers is None or None in (experts, topk, width, shared, start, end, interval):
        return
    last = layers - 1 if end == -1 else end
    frequency = [int((layer + 1) % interval == 0 and start <= layer <= last) for layer in range(layers)]
    if not any(frequency):
        return
    if topk > experts:
        reading.problem("moe_k", f"is more than the {experts} experts")
    if topk == 1:
        reading.problem("moe_k", "with one expert per token, normalized weights are 1 and the router gets no gradient")
    reading.values.update(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=width,
        moe_layer_freq=frequency,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="aux_loss",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        router_least_sum=reading.get("moe_norm_min", float, 1e-12),
    )
    if shared:
        reading.values["moe_shared_expert_intermediate_size"] = shared * width


def _mtp_tensor_names(_: ModelSpec) -> str:
    return r"model\.mtp_.*"


FAMILIES.register(
    "ernie4_5_moe",
    Family(
        name="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            *ERNIE,
            *ROUTER,
            FieldGroupRow(EXPERT_KEYS, _experts),
            RequiredValue("use_bias", (False,), "transformers' experts have no biases, and Megatron has one switch"),
            RequiredValue("moe_gate_act", ("softmax",), "the router's scores"),
            UnusedField(
                ("moe_capacity", "moe_gate", "moe_use_aux_free", "use_rmsnorm", "is_quantized"),
                "transformers' model does not read them",
            ),
            UnusedField(("num_nextn_predict_layers",), "how many layers for multi-token prediction are kept unchanged"),
            remote_code_row("ernie4_5_moe"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            OneRowRule(
                M + "mlp.router.expert_bias",
                (H + "mlp.moe_statics.e_score_correction_bias",),
                ("one", "experts"),
                "moe",
                buffer=True,
            ),
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        fixed={"rotary_interleaved": True, "moe_router_pre_softmax": False},
        kept=_mtp_tensor_names,
        unreadable=(null_kv_heads,),
    ),
)
