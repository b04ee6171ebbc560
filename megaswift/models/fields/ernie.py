"""Configuration rows of ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from megaswift.models.fields.decoder import kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.rows import ConfigRow, MappedField, RequiredValue, UnusedField

ERNIE: tuple[ConfigRow, ...] = (
    kv_heads_row(),
    rope_row(500000.0),
    padding_token_row(0),
    MappedField("tie_word_embeddings", "tied", bool, True),
    UnusedField(("attention_dropout",), "transformers' model has none"),
    RequiredValue("compression_ratio", (1,), "transformers' model does not compress positions"),
    UnusedField(
        ("weight_share_add_bias", "use_flash_attention", "ignored_index"), "transformers' model does not read them"
    ),
)
"""All but the width of heads, whose default differs, and biases."""
