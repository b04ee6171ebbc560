"""config.json of the models that configs/by_size names, as published, with the parameters on their model cards."""

from __future__ import annotations

from typing import Any

from tests.families.published import PUBLISHED

QWEN_2_5 = PUBLISHED["qwen2.5-7b"][0]
QWEN_3_MOE = PUBLISHED["qwen3-30b-a3b"][0]
LLAMA_3_1 = PUBLISHED["llama-3.1-8b"][0]


def shape(base: dict[str, Any], hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Another size of the same series."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, **more}


SHAPES: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen/Qwen2.5-7B-Instruct": PUBLISHED["qwen2.5-7b"],
    "Qwen/Qwen2.5-14B-Instruct": (
        shape(QWEN_2_5, 5120, 13824, 48, 40, num_key_value_heads=8, max_window_layers=48),
        14.77e9,
    ),
    "Qwen/Qwen2.5-32B-Instruct": (
        shape(QWEN_2_5, 5120, 27648, 64, 40, num_key_value_heads=8, max_window_layers=64),
        32.76e9,
    ),
    "Qwen/Qwen2.5-72B-Instruct": (
        shape(QWEN_2_5, 8192, 29568, 80, 64, num_key_value_heads=8, max_window_layers=80),
        72.71e9,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": PUBLISHED["llama-3.1-8b"],
    "meta-llama/Llama-3.3-70B-Instruct": (shape(LLAMA_3_1, 8192, 28672, 80, 64), 70.55e9),
    "Qwen/Qwen3-235B-A22B": (
        shape(QWEN_3_MOE, 4096, 12288, 94, 64, max_window_layers=94, moe_intermediate_size=1536),
        235.09e9,
    ),
}
