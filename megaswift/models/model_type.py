"""`--model_type` compared with config.json: a run on another architecture than the user expects ends before it starts.

Owns ms-swift's names, which are finer than transformers': one per generation and kind of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem

MS_SWIFT_TYPES: dict[str, tuple[str, ...]] = {
    "qwen2": ("qwen1_5", "qwen2_5", "qwen2_5_coder", "qwen2_5_math", "qwq", "qwq_preview", "deepseek_r1_distill"),
    "qwen2_moe": ("qwen1_5_moe",),
    "qwen3": ("qwen3_thinking", "qwen3_nothinking", "qwen3_coder", "qwen3_emb", "qwen3_reranker"),
    "qwen3_moe": ("qwen3_moe_thinking", "qwen3_coder_moe"),
    "qwen3_next": ("qwen3_next_thinking",),
    "llama": ("llama2", "llama3", "llama3_1", "llama3_2", "codellama", "deepseek_r1_distill"),
    "glm4": ("glm4_0414",),
    "glm4_moe": ("glm4_5",),
    "phi3": ("phi3_small", "phi4", "phi4_mini"),
    "deepseek_v2": ("deepseek_v2_5",),
    "deepseek_v3": ("deepseek_r1", "deepseek_v3_1", "moonlight", "kimi_k2"),
    "kimi_k2": ("deepseek_v3",),
    "deepseek": ("deepseek_moe",),
    "internvl": ("internvl2", "internvl2_5", "internvl3", "internvl3_5", "internvl_hf"),
    "gemma3_text": ("gemma3",),
    "granite": ("granite3",),
}
"""model_type of config.json -> names by which ms-swift registers models of it."""


def model_type_option_mismatch_problems(wanted: str | None, config: Mapping[str, Any]) -> list[Problem]:
    """A problem where config.json describes another architecture than `wanted`, by either toolkit's name."""
    actual = str(config.get("model_type", ""))
    known = (actual, *MS_SWIFT_TYPES.get(actual, ()))
    if wanted is None or wanted in known or _without_size(wanted) in known:
        return []
    if re.fullmatch(r"[a-z]+", wanted) and re.match(rf"{wanted}(_v)?\d", actual):  # any generation: qwen, glm
        return []
    rule = f"does not match the model, whose config.json has model_type {actual}"
    return [Problem(f"--model_type {wanted}", rule, f"--model_type {actual}, leave it out, or use another --model")]


def _without_size(name: str) -> str:
    """A name of ms-swift 2 without the size of the model and what follows it: qwen2-7b-instruct, internvl2-8b."""
    return re.sub(r"-\d+(_\d+)?[bm](-.*)?$", "", name.lower()).replace("-", "_")
