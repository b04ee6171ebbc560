"""MiniMax-M2: experts chosen by biased sigmoids, norms over all heads together, half-rotated heads.
https://huggingface.co/MiniMaxAI."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    AUXILIARY_IF_ASKED,
    EXPERTS_EVERYWHERE,
    head_dim_row,
    kv_heads_row,
    remote_code_row,
    rope_row,
)
from megaswift.models.fields.rows import (
    ConfigReading,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM_WIDE, expert_bias, moe_block

ROPE = rope_row(5e6, partial=1.0)


def _rope(reading: ConfigReading) -> None:
    """The shared row; the released folders give the rotated width in place of its share."""
    width = reading.get("rotary_dim", int, 0)
    head = reading.get("head_dim", int, 128, 1)
    raw = dict(reading.raw)
    if width and head and "partial_rotary_factor" not in raw:
        raw["partial_rotary_factor"] = width / head
    ROPE.read(ConfigReading(reading.family, raw, reading.problems, reading.values))


def _router(reading: ConfigReading) -> None:
    if reading.raw.get("scoring_func") not in (None, "sigmoid"):
        reading.problem("scoring_func", "must be 'sigmoid': transformers' model supports nothing else")
    if reading.values.get("num_moe_experts"):
        reading.values.update(
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0
        )


def _all_full(reading: ConfigReading) -> None:
    if set(reading.raw.get("attn_type_list") or [1]) != {1}:
        reading.problem("attn_type_list", "must be 1 for every layer: linear attention is not supported")


BETAS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
FAMILIES.register(
    "minimax_m2",
    Family(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        config=(
            MappedField("intermediate_size", "moe_ffn_hidden_size", int),
            head_dim_row(128),
            kv_heads_row(),
            FieldGroupRow((*ROPE.keys, "rotary_dim"), _rope),
            AUXILIARY_IF_ASKED,
            EXPERTS_EVERYWHERE,
            remote_code_row("minimax_m2"),
            FieldGroupRow(("scoring_func",), _router),
            FieldGroupRow(("attn_type_list",), _all_full),
            RequiredValue("use_routing_bias", (True,), "transformers' model has the bias"),
            RequiredValue("use_qk_norm", (True,), "transformers' model has the norms"),
            RequiredValue("qk_norm_type", ("per_layer",), "transformers' model normalizes all heads together"),
            RequiredValue(
                "router_jitter_noise",
                (0,),
                "transformers also adds the noise to the experts' inputs, Megatron only to the router's",
            ),
            RequiredValue("shared_intermediate_size", (0,), "transformers' model has no shared expert"),
            RequiredValue("sliding_window", (), "transformers' model has no windows"),
            *(RequiredValue(name, (1,), "transformers' model adds residuals unscaled") for name in BETAS),
            UnusedField(
                ("shared_moe_mode", "mlp_intermediate_size"),
                "of shared experts and dense layers, which the model does not have",
            ),
            UnusedField(
                ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), "the released folders contain no such layers"
            ),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM_WIDE,
            *moe_block("block_sparse_moe", "w1", "w3", "w2"),
            expert_bias("block_sparse_moe.e_score_correction_bias"),
            *HEAD,
        ),
        fixed={
            "qk_layernorm": True,
            "qk_norm_width": "all",
            "moe_router_pre_softmax": False,
            "router_normalized": True,
        },
        unreadable=(null_kv_heads,),
    ),
)
