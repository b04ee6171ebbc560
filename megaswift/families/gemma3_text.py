"""Gemma 3, text: norms on queries and keys, five windowed layers for each full layer, a rotary base for each kind.

https://arxiv.org/abs/2503.19786. The models with images (`gemma3`) contain this one; they are rejected.
"""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row
from megaswift.models.fields.gemma import GEMMA_2_AND_3, softcaps_row, two_ropes_row
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow
from megaswift.models.fields.windows import windows_by_layer_row
from megaswift.models.unreadable import float_query_scalar, null_kv_heads
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, QK_NORM, dense_mlp, post_norms


def _gemma3_layers(reading: ConfigReading) -> None:
    """Windows as `layer_types` says, else in all but every `sliding_window_pattern`-th layer.

    transformers notes the number it took as `_sliding_window_pattern`, and never reads that back.
    """
    raw = reading.raw
    every = None
    if raw.get("layer_types") is None:
        if "sliding_window_pattern" in raw and raw["sliding_window_pattern"] is None:
            reading.problem("sliding_window_pattern", "must be a number, unless layer_types is given")
        every = reading.get("sliding_window_pattern", int, 6, 1)
        noted = raw.get("_sliding_window_pattern", every)
        if every and noted != every:
            reading.problem(
                "_sliding_window_pattern",
                f"has no effect in transformers, which uses {every}, from sliding_window_pattern or its default",
                "write layer_types, or sliding_window_pattern without the underscore",
            )
    windows_by_layer_row(lambda _, layer: bool((layer + 1) % (every or 6)), 4096).read(reading)


GEMMA3_LAYERS = FieldGroupRow(
    ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"), _gemma3_layers
)


FAMILIES.register(
    "gemma3_text",
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        config=(
            FFN,
            padding_token_row(0),
            head_dim_row(256),
            kv_heads_row(),
            two_ropes_row(1e6, 1e4),
            *GEMMA_2_AND_3,
            softcaps_row(None, None, caps_scores=False),
            GEMMA3_LAYERS,
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
            *dense_mlp(norm="pre_feedforward_layernorm"),
            *HEAD,
        ),
        fixed={
            "layernorm_zero_centered_gamma": True,
            "activation_func": "gelu_tanh",
            "post_norm": True,
            "qk_layernorm": True,
        },
        unreadable=(null_kv_heads, float_query_scalar),
    ),
)
