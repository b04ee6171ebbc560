"""Qwen3.5 and 3.6, dense, as published: a vision-language model, whose language model is `qwen3_5_text`.
https://qwen.ai/blog?id=qwen3.5."""

from __future__ import annotations

from megaswift.families.qwen3_5_text import QWEN3_5_TEXT
from megaswift.models.family import FAMILIES, vision_language_family

FAMILIES.register("qwen3_5", vision_language_family("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_TEXT))
