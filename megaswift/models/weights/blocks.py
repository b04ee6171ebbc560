"""Weight tables of the parts that decoder families share, by their Hugging Face names.

Owns attention and MLP tables; a family file puts them together and adds what is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from megaswift.models.stored_form import STACKED
from megaswift.models.weights.rules import (
    ColumnParallelRule,
    FusedHfTensorRule,
    FusedQKVRule,
    GateUpRule,
    ReplicatedRule,
    RowParallelRule,
    Scope,
    StackedDown,
    StackedGateUp,
    VocabParallelRule,
    WeightRule,
)

M = "decoder.layers.{L}."
H = "model.layers.{L}."
A = H + "self_attn."

EMBEDDING: tuple[WeightRule, ...] = (
    VocabParallelRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
)

HEAD: tuple[WeightRule, ...] = (
    ReplicatedRule("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",), "model"),
    VocabParallelRule("output_layer.weight", ("lm_head.weight",), when="untied"),
    ReplicatedRule("score.weight", ("score.weight",), ("labels", "hidden_size"), "model", when="scored"),
    ReplicatedRule("score.bias", ("score.bias",), ("labels",), "model", when="score_bias"),
)

INPUT_NORM = ReplicatedRule(
    M + "self_attention.linear_qkv.layer_norm_weight", (H + "input_layernorm.weight",), ("hidden_size",)
)
QKV_WEIGHT = FusedQKVRule(
    M + "self_attention.linear_qkv.weight", (A + "q_proj.weight", A + "k_proj.weight", A + "v_proj.weight")
)
PROJECTIONS: tuple[WeightRule, ...] = (
    QKV_WEIGHT,
    FusedQKVRule(
        M + "self_attention.linear_qkv.bias",
        (A + "q_proj.bias", A + "k_proj.bias", A + "v_proj.bias"),
        matrix=False,
        when="qkv_bias",
    ),
    RowParallelRule(
        M + "self_attention.linear_proj.weight", (A + "o_proj.weight",), ("hidden_size", "attention_width")
    ),
    ReplicatedRule(M + "self_attention.linear_proj.bias", (A + "o_proj.bias",), ("hidden_size",), when="linear_bias"),
)
ATTENTION: tuple[WeightRule, ...] = (INPUT_NORM, *PROJECTIONS)
FUSED_ATTENTION: tuple[WeightRule, ...] = (
    INPUT_NORM,
    FusedHfTensorRule(QKV_WEIGHT, A + "qkv_proj.weight"),
    *PROJECTIONS[1:],
)
"""Query, key and value in one tensor."""

QK_NORM: tuple[WeightRule, ...] = (
    ReplicatedRule(M + "self_attention.q_layernorm.weight", (A + "q_norm.weight",), ("head_dim",), when="qk_norm"),
    ReplicatedRule(M + "self_attention.k_layernorm.weight", (A + "k_norm.weight",), ("head_dim",), when="qk_norm"),
)

ROTATED_QK_NORM: tuple[WeightRule, ...] = (
    ReplicatedRule(M + "self_attention.rotated_q_layernorm.weight", (A + "query_layernorm.weight",), ("head_dim",)),
    ReplicatedRule(M + "self_attention.rotated_k_layernorm.weight", (A + "key_layernorm.weight",), ("head_dim",)),
)
"""Norms of queries and keys after their rotation."""

QK_NORM_WIDE: tuple[WeightRule, ...] = (
    ColumnParallelRule(M + "self_attention.q_layernorm.weight", (A + "q_norm.weight",), ("attention_width",)),
    ColumnParallelRule(M + "self_attention.k_layernorm.weight", (A + "k_norm.weight",), ("kv_width",)),
)
"""Norms over all heads together: a rank has the weights of its heads."""


def expert_bias(name: str) -> ReplicatedRule:
    """The bias, called `name` in a layer, that counts for the choice of experts and not for their weights."""
    return ReplicatedRule(M + "mlp.router.expert_bias", (H + name,), ("experts",), "moe", buffer=True)


EXPERT_BIAS = expert_bias("mlp.gate.e_score_correction_bias")


def dense_mlp(
    scope: Scope = "layer", norm: str = "post_attention_layernorm", fused: bool = False
) -> tuple[WeightRule, ...]:
    """Norm (none where it has no name), gate and up (`fused`: in one tensor), down. `scope` is `dense` in families with
    MoE layers too."""
    mlp = H + "mlp."
    gate_up = GateUpRule(M + "mlp.linear_fc1.weight", (mlp + "gate_proj.weight", mlp + "up_proj.weight"), scope=scope)
    return (
        *(_mlp_norm(norm, scope) if norm else ()),
        FusedHfTensorRule(gate_up, mlp + "gate_up_proj.weight") if fused else gate_up,
        GateUpRule(
            M + "mlp.linear_fc1.bias",
            (mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            matrix=False,
            scope=scope,
            when="linear_bias",
        ),
        *_mlp_down(scope),
    )


def ungated_mlp() -> tuple[WeightRule, ...]:
    """Norm, up, down: an MLP without a gate."""
    up = H + "mlp.up_proj."
    return (
        *_mlp_norm("post_attention_layernorm", "layer"),
        ColumnParallelRule(M + "mlp.linear_fc1.weight", (up + "weight",), ("ffn", "hidden_size")),
        ColumnParallelRule(M + "mlp.linear_fc1.bias", (up + "bias",), ("ffn",), when="linear_bias"),
        *_mlp_down("layer"),
    )


def _mlp_norm(norm: str, scope: Scope) -> tuple[WeightRule, ...]:
    return (ReplicatedRule(M + "mlp.linear_fc1.layer_norm_weight", (f"{H}{norm}.weight",), ("hidden_size",), scope),)


def _mlp_down(scope: Scope) -> tuple[WeightRule, ...]:
    down = H + "mlp.down_proj."
    return (
        RowParallelRule(M + "mlp.linear_fc2.weight", (down + "weight",), ("hidden_size", "ffn"), scope),
        ReplicatedRule(M + "mlp.linear_fc2.bias", (down + "bias",), ("hidden_size",), scope, when="linear_bias"),
    )


def post_norms(attention: str, mlp: str) -> tuple[WeightRule, ...]:
    """Norms on the outputs of attention and MLP, by their HF names."""
    return (
        ReplicatedRule(
            M + "self_attention.linear_proj.post_layernorm.weight", (f"{H}{attention}.weight",), ("hidden_size",)
        ),
        ReplicatedRule(M + "mlp.linear_fc2.post_layernorm.weight", (f"{H}{mlp}.weight",), ("hidden_size",)),
    )


def norm_and_router(block: str, name: str = "gate") -> tuple[WeightRule, ...]:
    """Norm and router of a MoE layer whose HF module is called `block`, the router `name`."""
    return (
        ReplicatedRule(
            M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",), ("hidden_size",), "moe"
        ),
        ReplicatedRule(M + "mlp.router.weight", (f"{H}{block}.{name}.weight",), ("experts", "hidden_size"), "moe"),
    )


def moe_block(block: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[WeightRule, ...]:
    """Norm, router and experts of a MoE layer whose HF module is called `block`, its projections `gate`, `up`,
    `down`."""
    e = f"{H}{block}.experts.{{E}}."
    return (
        *norm_and_router(block, router),
        GateUpRule(
            M + "mlp.experts.{E}.linear_fc1.weight",
            (f"{e}{gate}.weight", f"{e}{up}.weight"),
            "expert_ffn",
            scope="expert",
        ),
        RowParallelRule(
            M + "mlp.experts.{E}.linear_fc2.weight", (f"{e}{down}.weight",), ("hidden_size", "expert_ffn"), "expert"
        ),
    )


def experts_in_both_forms(block: Sequence[WeightRule]) -> tuple[WeightRule, ...]:
    """A MoE block whose experts a folder has one by one, or stacked: [E, 2 f, h] and [E, h, f], as transformers holds
    them in memory."""
    return (
        *(replace(cast(Any, rule), when="split_experts") if rule.scope == "expert" else rule for rule in block),
        *stacked_experts(STACKED),
    )


def stacked_experts(when: str = "") -> tuple[WeightRule, ...]:
    """Experts that share two tensors, [E, 2 f, h] and [E, h, f]; `when`: the fact of a model that has them."""
    e = H + "mlp.experts."
    m = M + "mlp.experts.{E}."
    return (
        StackedGateUp(m + "linear_fc1.weight", (e + "gate_up_proj",), when=when),
        StackedDown(m + "linear_fc2.weight", (e + "down_proj",), turned=False, when=when),
    )


def shared_experts(name: str) -> tuple[WeightRule, ...]:
    """The MLP that every token of a MoE layer goes through; `name` is HF's, `shared_expert` or `shared_experts`."""
    e = f"{H}mlp.{name}."
    m = M + "mlp.shared_experts."
    return (
        GateUpRule(m + "linear_fc1.weight", (e + "gate_proj.weight", e + "up_proj.weight"), "shared_ffn", scope="moe"),
        RowParallelRule(m + "linear_fc2.weight", (e + "down_proj.weight",), ("hidden_size", "shared_ffn"), "moe"),
    )
