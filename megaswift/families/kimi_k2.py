"""Kimi K2: DeepSeek-V3 with other sizes, under a model type of its own. https://arxiv.org/abs/2507.20534."""

from __future__ import annotations

from dataclasses import replace

from megaswift.families.deepseek_v3 import DEEPSEEK_V3
from megaswift.models.family import FAMILIES

FAMILIES.register("kimi_k2", replace(DEEPSEEK_V3, name="kimi_k2", transformers_type="deepseek_v3"))
