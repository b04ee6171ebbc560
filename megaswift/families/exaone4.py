"""EXAONE 4: norms only after attention and MLP; full layers without rotary embedding where others have windows.

https://arxiv.org/abs/2507.11407.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem
from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow
from megaswift.models.fields.windows import windows_by_layer_row
from megaswift.models.unreadable import null_kv_heads, unreadable_value
from megaswift.models.weights.blocks import EMBEDDING, HEAD, PROJECTIONS, QK_NORM, dense_mlp, post_norms


def _exaone_layers(reading: ConfigReading) -> None:
    """Windows as `layer_types` or `sliding_window_pattern` say; where there are any, full layers have no rotary
    embedding."""
    every = reading.raw.get("sliding_window_pattern", 4)
    windows = reading.raw.get("sliding_window", 4096) is not None
    if windows and not isinstance(every, int) and reading.raw.get("layer_types") is None:
        reading.problem("sliding_window_pattern", "must be a number, unless layer_types is given")
        return
    windows_by_layer_row(lambda _, layer: windows and bool((layer + 1) % every if every else True), 4096).read(reading)
    layers = reading.layers()
    if windows and layers is not None:
        windowed = reading.values.get("window_attn_skip_freq") or [int("window_size" in reading.values)] * layers
        if not all(windowed):
            reading.values["no_rope_freq"] = [1 - sliding for sliding in windowed]


EXAONE_LAYERS = FieldGroupRow(("sliding_window", "layer_types", "sliding_window_pattern"), _exaone_layers)


def computed_layer_types(raw: Mapping[str, Any]) -> Problem | None:
    """Values from which transformers cannot compute the `layer_types` that the file lacks."""
    if raw.get("layer_types") is not None:
        return None
    if raw.get("sliding_window", 0) is None:
        key = "sliding_window"
    elif raw.get("sliding_window_pattern") == 0:
        key = "sliding_window_pattern"
    else:
        return None
    rule = "needs layer_types: transformers cannot compute them from this value"
    fix = 'add "layer_types", with "full_attention" or "sliding_attention" for each layer'
    return unreadable_value(raw, key, rule, fix)


FAMILIES.register(
    "exaone4",
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        config=(FFN, head_dim_row(), kv_heads_row(), rope_row(), EXAONE_LAYERS),
        weights=(
            *EMBEDDING,
            *PROJECTIONS,
            *QK_NORM,
            *post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
            *dense_mlp(norm=""),
            *HEAD,
        ),
        fixed={"qk_layernorm": True, "pre_norm": False, "post_norm": True},
        unreadable=(null_kv_heads, computed_layer_types),
    ),
)
