"""Configuration rows of several dense families: two rotary bases in a model, Gemma's fields, soft caps.

What a single family has stands in its file; `decoder` has what most families share.
"""

from __future__ import annotations

import math
from typing import Any

from megaswift.models.fields.decoder import rope_row
from megaswift.models.fields.rows import (
    ConfigReading,
    ConfigRow,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)
from megaswift.models.fields.windows import WindowedLayer
from megaswift.models.spec import RopeSpec


def two_ropes_row(full_theta: float, local_theta: float) -> FieldGroupRow:
    """Two rotary embeddings: `rope_theta` with scaling in full layers, `rope_local_base_freq` without any in windowed
    ones.

    transformers 5 writes both into `rope_parameters`, by kind of layer. The thetas are transformers' defaults.
    """

    def read(reading: ConfigReading) -> None:
        raw = reading.raw
        rope_parameters: Any = raw.get("rope_parameters") or {}
        full = rope_parameters.get("full_attention") or {}
        local = rope_parameters.get("sliding_attention") or {}
        for name in rope_parameters:
            if name not in ("full_attention", "sliding_attention"):
                reading.problem(
                    "rope_parameters", f"{name} is not a layer type; use full_attention or sliding_attention"
                )
        merged = {"rope_theta": raw.get("rope_theta") or full_theta, **full, **(raw.get("rope_scaling") or {})}
        plain = ConfigReading(
            reading.family,
            {"rope_parameters": merged, "max_position_embeddings": raw.get("max_position_embeddings")},
            reading.problems,
            reading.values,
        )
        rope_row().read(plain)
        if local.get("rope_type", "default") != "default" or set(local) - {"rope_type", "rope_theta"}:
            reading.problem(
                "rope_parameters",
                "scaling of sliding_attention is not supported: transformers' released models have none",
            )
        reading.values["rope_local"] = RopeSpec(
            float(local.get("rope_theta") or raw.get("rope_local_base_freq") or local_theta)
        )

    return FieldGroupRow(("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"), read)


def _embedding_scale(reading: ConfigReading) -> None:
    hidden = reading.get("hidden_size", int, least=1)
    reading.values.update(hidden_size=hidden, embedding_scale=math.sqrt(hidden or 1), embedding_scale_rounded=True)


def _query_scale(reading: ConfigReading) -> None:
    scalar = reading.get("query_pre_attn_scalar", float, 256.0)
    if not scalar:
        reading.problem("query_pre_attn_scalar", "must be above 0")
        return
    reading.values["softmax_scale"] = scalar**-0.5


GEMMA: tuple[ConfigRow, ...] = (
    MappedField("tie_word_embeddings", "tied", bool, True),
    FieldGroupRow(("hidden_size",), _embedding_scale),
    UnusedField(("cache_implementation",), "how transformers generates"),
    RequiredValue(
        "use_bidirectional_attention", (False,), "of embedding models: a language model's attention is causal"
    ),
    RequiredValue(
        "attention_bias", (False,), "Megatron has a single switch for the biases of the attention output and the MLP"
    ),
)
"""Fields of every Gemma beyond those of all families."""
GEMMA_2_AND_3: tuple[ConfigRow, ...] = (
    *GEMMA,
    FieldGroupRow(("query_pre_attn_scalar",), _query_scale),
    RequiredValue("hidden_activation", ("gelu_pytorch_tanh",), "the gated MLP's activation"),
    UnusedField(("hidden_act",), "transformers' model reads hidden_activation"),
)


def softcaps_row(attention: float | None, logits: float | None, *, caps_scores: bool = True) -> FieldGroupRow:
    """Caps of attention scores and logits, null for none; transformers' defaults where the fields are absent. Without
    `caps_scores` transformers' model caps no scores, whatever its configuration says."""

    def read(reading: ConfigReading) -> None:
        caps = {
            "attn_logit_softcapping": ("attention_softcap", attention),
            "final_logit_softcapping": ("logit_softcap", logits),
        }
        for key, (target, default) in caps.items():
            cap = reading.get(key, float, None) if key in reading.raw else default
            if cap == 0:
                reading.problem(key, "must be above 0, or null for no cap")
            reading.values[target] = cap
        if not caps_scores and reading.values["attention_softcap"] is not None:
            reading.problem("attn_logit_softcapping", "must be null: transformers' model does not cap attention scores")
        dropout = reading.get("attention_dropout", float, 0.0)
        if dropout and reading.values["attention_softcap"] is not None:
            reading.problem("attention_dropout", "must be 0: attention with a soft cap does not support dropout")
        reading.values["attention_dropout"] = dropout

    return FieldGroupRow(("attn_logit_softcapping", "final_logit_softcapping", "attention_dropout"), read)


def windowed_except_every_nth_layer(every: int) -> WindowedLayer:
    """A window in all layers except every `every`-th."""
    return lambda _, layer: (layer + 1) % every != 0
