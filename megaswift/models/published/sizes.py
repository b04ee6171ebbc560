"""Other sizes of published series, and models by the names that people type.

`table.py` has files as their authors wrote them; here a size is what differs from its series' file.
"""

from __future__ import annotations

import re
from typing import Any

from megaswift.models.published.moe import GPT_OSS_20B
from megaswift.models.published.table import PUBLISHED

QWEN_2_5 = PUBLISHED["qwen2.5-7b"][0]
QWEN_3 = {**PUBLISHED["qwen3-0.6b"][0], "tie_word_embeddings": False}
QWEN_3_MOE = PUBLISHED["qwen3-30b-a3b"][0]
LLAMA_3_1 = PUBLISHED["llama-3.1-8b"][0]
LLAMA_3_2 = PUBLISHED["llama-3.2-1b"][0]
MIXTRAL = PUBLISHED["mixtral-8x7b"][0]
VARIANT = re.compile(r"-(instruct|base|chat|it|hf|thinking|v\d(\.\d)?|\d{4})$")
"""The end of a name behind which the sizes are the same."""


def _shape(base: dict[str, Any], hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Another size of the same series."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, **more}


def _small_qwen(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    small = {"num_key_value_heads": 2, "max_window_layers": layers, "tie_word_embeddings": True, "vocab_size": 151936}
    return _shape(QWEN_2_5, hidden, mlp, layers, heads, **small)


SIZES: dict[str, tuple[dict[str, Any], float]] = {
    "qwen2.5-0.5b": (_small_qwen(896, 4864, 24, 14), 494.0e6),
    "qwen2.5-1.5b": (_small_qwen(1536, 8960, 28, 12), 1.5437e9),
    "qwen2.5-3b": (_small_qwen(2048, 11008, 36, 16), 3.0859e9),
    "qwen2.5-14b": (_shape(QWEN_2_5, 5120, 13824, 48, 40, num_key_value_heads=8, max_window_layers=48), 14.77e9),
    "qwen2.5-32b": (_shape(QWEN_2_5, 5120, 27648, 64, 40, num_key_value_heads=8, max_window_layers=64), 32.76e9),
    "qwen2.5-72b": (_shape(QWEN_2_5, 8192, 29568, 80, 64, num_key_value_heads=8, max_window_layers=80), 72.71e9),
    "qwen3-1.7b": (_shape(QWEN_3, 2048, 6144, 28, 16, tie_word_embeddings=True), 1.7206e9),
    "qwen3-4b": (_shape(QWEN_3, 2560, 9728, 36, 32, tie_word_embeddings=True, max_window_layers=36), 4.0225e9),
    "qwen3-8b": (_shape(QWEN_3, 4096, 12288, 36, 32, max_window_layers=36), 8.1907e9),
    "qwen3-14b": (_shape(QWEN_3, 5120, 17408, 40, 40, max_window_layers=40), 14.768e9),
    "qwen3-32b": (_shape(QWEN_3, 5120, 25600, 64, 64, max_window_layers=64), 32.762e9),
    "qwen3-235b-a22b": (
        _shape(QWEN_3_MOE, 4096, 12288, 94, 64, max_window_layers=94, moe_intermediate_size=1536),
        235.09e9,
    ),
    "llama-3.2-3b": (_shape(LLAMA_3_2, 3072, 8192, 28, 24, head_dim=128), 3.2128e9),
    "llama-3.1-70b": (_shape(LLAMA_3_1, 8192, 28672, 80, 64), 70.55e9),
    "llama-3.3-70b": (_shape(LLAMA_3_1, 8192, 28672, 80, 64), 70.55e9),
    "llama-3.1-405b": (_shape(LLAMA_3_1, 16384, 53248, 126, 128), 405.85e9),
    "mixtral-8x22b": (_shape(MIXTRAL, 6144, 16384, 56, 48), 140.62e9),
    "gpt-oss-120b": (
        {
            **GPT_OSS_20B,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        116.83e9,
    ),
}
"""Name -> (config.json, parameters)."""
MODELS: dict[str, tuple[dict[str, Any], float]] = {**PUBLISHED, **SIZES}
"""All models that are known by name."""


def published_model(name: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the table's name and the config.json of a hub id or a name in any spelling; None where it is not
    there."""
    short = name.strip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while short not in MODELS and (shorter := VARIANT.sub("", short)) != short:
        short = shorter
    return (short, MODELS[short][0]) if short in MODELS else None
