"""The language model of Qwen3.5 and 3.6, dense: gated delta nets and output-gated attention.
https://qwen.ai/blog?id=qwen3.5."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN
from megaswift.models.fields.gated_delta import HYBRID, HYBRID_FIXED, mtp_tensor_names
from megaswift.models.unreadable import null_kv_heads
from megaswift.models.weights.blocks import EMBEDDING, HEAD, dense_mlp
from megaswift.models.weights.gated_delta import GATED_ATTENTION, SPLIT_INPUT, gated_delta_net
from megaswift.models.weights.mtp import QWEN_MTP

QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    config=(FFN, *HYBRID),
    weights=(*EMBEDDING, *gated_delta_net(SPLIT_INPUT), *GATED_ATTENTION, *dense_mlp(), *HEAD),
    fixed=HYBRID_FIXED,
    kept=mtp_tensor_names,
    mtp=QWEN_MTP,
    unreadable=(null_kv_heads,),
)
FAMILIES.register("qwen3_5_text", QWEN3_5_TEXT)
