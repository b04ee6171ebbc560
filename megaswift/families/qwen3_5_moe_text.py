"""The language model of Qwen3.5 and 3.6 with experts: gated delta nets and output-gated attention, a gated shared
expert. https://qwen.ai/blog?id=qwen3.5."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import EXPERTS_EVERYWHERE
from megaswift.models.fields.gated_delta import EXPERTS, HYBRID, HYBRID_FIXED, mtp_tensor_names
from megaswift.models.fields.rows import RequiredValue, UnusedField
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import EMBEDDING, HEAD, experts_in_both_forms, moe_block
from megaswift.models.weights.gated_delta import GATED_ATTENTION, SPLIT_INPUT, gated_delta_net, gated_shared_expert
from megaswift.models.weights.mtp import QWEN_MTP

OF_QWEN3_NEXT = (
    RequiredValue("mlp_only_layers", ([],), "every layer has experts"),
    RequiredValue("decoder_sparse_step", (1,), "every layer has experts"),
    RequiredValue("norm_topk_prob", (True,), "transformers' model scales the chosen experts' weights to 1"),
    UnusedField(("intermediate_size",), "the width of dense MLPs, of which there are none"),
)
"""Fields that published files have left from Qwen3-Next, whose configuration class theirs comes from."""
QWEN3_5_MOE_TEXT = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    config=(*HYBRID, *EXPERTS, EXPERTS_EVERYWHERE, *OF_QWEN3_NEXT),
    weights=(
        *EMBEDDING,
        *gated_delta_net(SPLIT_INPUT),
        *GATED_ATTENTION,
        *experts_in_both_forms(moe_block("mlp", "gate_proj", "up_proj", "down_proj")),
        *gated_shared_expert(),
        *HEAD,
    ),
    fixed={**HYBRID_FIXED, "moe_shared_expert_gate": True, "moe_router_pre_softmax": False},
    kept=mtp_tensor_names,
    mtp=QWEN_MTP,
    unreadable=(null_kv_heads,),
)
FAMILIES.register("qwen3_5_moe_text", QWEN3_5_MOE_TEXT)
