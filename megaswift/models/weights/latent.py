"""Weight table of multi-head latent attention. Megatron's heads are rows of the second projections, in Hugging Face's
order."""

from __future__ import annotations

from megaswift.models.weights.blocks import A, H, M
from megaswift.models.weights.rules import ColumnParallelRule, ReplicatedRule, RowParallelRule, WeightRule

S = M + "self_attention."

LATENT_ATTENTION: tuple[WeightRule, ...] = (
    ReplicatedRule(M + "input_layernorm.weight", (H + "input_layernorm.weight",), ("hidden_size",)),
    ColumnParallelRule(
        S + "linear_q_proj.weight", (A + "q_proj.weight",), ("latent_queries", "hidden_size"), when="whole_queries"
    ),
    ReplicatedRule(S + "linear_q_down_proj.weight", (A + "q_a_proj.weight",), ("q_rank", "hidden_size"), when="q_rank"),
    ReplicatedRule(S + "linear_q_up_proj.layer_norm_weight", (A + "q_a_layernorm.weight",), ("q_rank",), when="q_rank"),
    ColumnParallelRule(
        S + "linear_q_up_proj.weight", (A + "q_b_proj.weight",), ("latent_queries", "q_rank"), when="q_rank"
    ),
    ReplicatedRule(
        S + "linear_kv_down_proj.weight", (A + "kv_a_proj_with_mqa.weight",), ("latent_width", "hidden_size")
    ),
    ReplicatedRule(S + "linear_kv_up_proj.layer_norm_weight", (A + "kv_a_layernorm.weight",), ("kv_rank",)),
    ColumnParallelRule(S + "linear_kv_up_proj.weight", (A + "kv_b_proj.weight",), ("latent_keys_values", "kv_rank")),
    RowParallelRule(S + "linear_proj.weight", (A + "o_proj.weight",), ("hidden_size", "attention_width")),
)
