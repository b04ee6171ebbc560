"""Solar Open 100B: attention as in Llama, in every layer experts chosen by biased sigmoids beside a shared one.
https://huggingface.co/upstage/Solar-Open-100B."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import head_dim_row, kv_heads_row, remote_code_row, rope_row
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.rows import MappedField, RequiredValue, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, EXPERT_BIAS, HEAD, moe_block, shared_experts

ROUTER = RouterDefaults(
    "sigmoid",
    best=2,
    bias=True,
    first_dense=0,
    shared=1,
    scaling=1.0,
    normalized=True,
    dense_count_read=False,
)

FAMILIES.register(
    "solar_open",
    Family(
        name="solar_open",
        architecture="SolarOpenForCausalLM",
        config=(
            head_dim_row(128),
            kv_heads_row(),
            rope_row(1e6, partial=1.0),
            MappedField("attention_bias", "add_qkv_bias", bool, False),
            routed_experts_row(ROUTER),
            RequiredValue("use_qk_norm", (False,), "transformers' model has no norms on queries and keys"),
            UnusedField(("intermediate_size",), "the width of dense MLPs, of which there are none"),
            *PRETRAINING,
            remote_code_row("solar_open"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            EXPERT_BIAS,
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        unreadable=(null_kv_heads,),
    ),
)
