"""Qwen3-Next: gated delta nets and output-gated attention, experts in all or some layers, a gated shared expert.
https://qwen.ai/blog?id=4074cca80393150c248e508aa62983f9cb7d27cd."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, SPARSE_LAYERS, norm_topk_row
from megaswift.models.fields.gated_delta import EXPERTS, HYBRID, HYBRID_FIXED, mtp_tensor_names
from megaswift.models.fields.rows import RequiredValue
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import EMBEDDING, HEAD, dense_mlp, moe_block
from megaswift.models.weights.gated_delta import GATED_ATTENTION, JOINED_INPUT, gated_delta_net, gated_shared_expert
from megaswift.models.weights.mtp import QWEN_MTP

FAMILIES.register(
    "qwen3_next",
    Family(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        config=(
            FFN,
            *HYBRID,
            *EXPERTS,
            norm_topk_row(True),
            SPARSE_LAYERS,
            RequiredValue("use_sliding_window", (False,), "transformers' model has no windows"),
        ),
        weights=(
            *EMBEDDING,
            *gated_delta_net(JOINED_INPUT),
            *GATED_ATTENTION,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            *gated_shared_expert(),
            *HEAD,
        ),
        fixed={**HYBRID_FIXED, "moe_shared_expert_gate": True},
        kept=mtp_tensor_names,
        mtp=QWEN_MTP,
        unreadable=(null_kv_heads,),
    ),
)
