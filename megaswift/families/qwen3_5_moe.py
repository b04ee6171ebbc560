"""Qwen3.5 and 3.6 with experts, as published: a vision-language model, whose language model is `qwen3_5_moe_text`.
https://qwen.ai/blog?id=qwen3.5."""

from __future__ import annotations

from megaswift.families.qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from megaswift.models.family import FAMILIES, vision_language_family

FAMILIES.register(
    "qwen3_5_moe",
    vision_language_family(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        QWEN3_5_MOE_TEXT,
        fixed={**QWEN3_5_MOE_TEXT.fixed, "stacked_experts": True},
    ),
)
