"""SmolLM3: no rotary embedding in every fourth layer (NoPE, arXiv:2501.18795), tied embeddings."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import BIASES, FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.rows import ConfigReading, ConfigRow, FieldGroupRow, MappedField, UnusedField
from megaswift.models.fields.windows import windows_by_layer_row
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp


def _without_rotation(reading: ConfigReading) -> None:
    """Read which layers have no rotary embedding: the zeros of `no_rope_layers`, where despite the name 1 stands for a
    layer with rotary embedding (as in transformers); without that list, every `no_rope_layer_interval`-th layer."""
    layers = reading.layers()
    interval = reading.get("no_rope_layer_interval", int, 4, 1)
    if layers is None or interval is None:
        return
    rotated = reading.raw.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or set(rotated) - {0, 1}:
        reading.problem("no_rope_layers", f"must have {layers} entries, each 0 or 1")
        return
    if not all(rotated):
        reading.values["no_rope_freq"] = [1 - with_rope for with_rope in rotated]


def _smollm3_windowed(reading: ConfigReading, layer: int) -> bool:
    """Whether `layer` attends within a window. As in transformers, only layers without rotary embedding do."""
    no_rope = reading.values.get("no_rope_freq")
    return reading.raw.get("sliding_window") is not None and no_rope is not None and bool(no_rope[layer])


SMOLLM3: tuple[ConfigRow, ...] = (
    MappedField("tie_word_embeddings", "tied", bool, True),
    FieldGroupRow(("no_rope_layers", "no_rope_layer_interval"), _without_rotation),
    windows_by_layer_row(_smollm3_windowed, None, switched=True),
    UnusedField(("pretraining_tp", "max_window_layers"), "transformers' model does not read them"),
)


FAMILIES.register(
    "smollm3",
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        config=(FFN, padding_token_row(128004), head_dim_row(), kv_heads_row(), rope_row(2e6), BIASES, *SMOLLM3),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
    ),
)
