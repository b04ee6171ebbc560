"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts with a clamped activation.
arXiv:2508.10925."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    AUXILIARY_IF_ASKED,
    EXPERTS_EVERYWHERE,
    head_dim_row,
    kv_heads_row,
    rope_row,
)
from megaswift.models.fields.rows import (
    ConfigReading,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)
from megaswift.models.fields.windows import is_even_layer, windows_by_layer_row
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, A, H, M
from megaswift.models.weights.rules import (
    ColumnParallelRule,
    InterleavedGateUp,
    ReplicatedRule,
    StackedDown,
    StackedReplicatedRule,
)

ROPE = rope_row(150000.0)


def _rope(reading: ConfigReading) -> None:
    """The shared row, where scaling is given: transformers' default for this family is yarn, and nobody means that by
    silence."""
    if not (reading.raw.get("rope_scaling") or reading.raw.get("rope_parameters")):
        reading.problem(
            "rope_scaling",
            "is missing",
            'write the scaling that the model was trained with; for none, {"rope_type": "default"}',
        )
        return
    ROPE.read(reading)


MLP = H + "mlp."
FAMILIES.register(
    "gpt_oss",
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        config=(
            MappedField("intermediate_size", "moe_ffn_hidden_size", int),
            head_dim_row(64),
            kv_heads_row(),
            FieldGroupRow(ROPE.keys, _rope),
            windows_by_layer_row(is_even_layer, 128),
            MappedField("swiglu_limit", "activation_func_clamp_value", float, 7.0),
            RequiredValue("swiglu_alpha", (1.702,), "the constant of Megatron's quick_gelu"),
            RequiredValue(
                "attention_bias",
                (True,),
                "Megatron has a single switch for all biases, and the experts of this family have biases",
            ),
            AUXILIARY_IF_ASKED,
            EXPERTS_EVERYWHERE,
            UnusedField(("experts_per_token",), "determined by num_experts_per_tok"),
            UnusedField(("initial_context_length",), "determined by the scaling of the rotary embedding"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            ColumnParallelRule(M + "self_attention.core_attention.softmax_offset", (A + "sinks",), ("heads",)),
            ReplicatedRule(
                M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",), ("hidden_size",), "moe"
            ),
            ReplicatedRule(M + "mlp.router.weight", (MLP + "router.weight",), ("experts", "hidden_size"), "moe"),
            ReplicatedRule(M + "mlp.router.bias", (MLP + "router.bias",), ("experts",), "moe"),
            InterleavedGateUp(M + "mlp.experts.{E}.linear_fc1.weight", (MLP + "experts.gate_up_proj",)),
            InterleavedGateUp(
                M + "mlp.experts.{E}.linear_fc1.bias", (MLP + "experts.gate_up_proj_bias",), matrix=False
            ),
            StackedDown(M + "mlp.experts.{E}.linear_fc2.weight", (MLP + "experts.down_proj",)),
            StackedReplicatedRule(M + "mlp.experts.{E}.linear_fc2.bias", (MLP + "experts.down_proj_bias",)),
            *HEAD,
        ),
        fixed={
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": "quick_gelu",
            "glu_linear_offset": 1.0,
            "moe_router_pre_softmax": False,
        },
        unreadable=(null_kv_heads,),
    ),
)
