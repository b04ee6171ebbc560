"""Granite 3: factors on embeddings, attention scores, residual branches and logits.
https://huggingface.co/ibm-granite."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import BIASES, FFN, head_dim_row, kv_heads_row, rope_row
from megaswift.models.fields.rows import ConfigReading, ConfigRow, FieldGroupRow
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp


def _factor(key: str, target: str, *, inverse: bool = False) -> FieldGroupRow:
    """A factor above 0, 1 where absent; `inverse` where the field is the divisor."""

    def read(reading: ConfigReading) -> None:
        value = reading.get(key, float, 1.0)
        if not value:
            reading.problem(key, "must be above 0")
            return
        reading.values[target] = 1.0 / value if inverse else value

    return FieldGroupRow((key,), read)


GRANITE: tuple[ConfigRow, ...] = (
    _factor("embedding_multiplier", "embedding_scale"),
    _factor("attention_multiplier", "softmax_scale"),
    _factor("residual_multiplier", "residual_scale"),
    _factor("logits_scaling", "logit_scale", inverse=True),
)


FAMILIES.register(
    "granite",
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        config=(FFN, head_dim_row(), kv_heads_row(required=False), rope_row(), BIASES, *GRANITE),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
    ),
)
