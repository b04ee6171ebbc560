"""Configuration row of models some of whose layers have a sliding window, and others full attention.

Owns the meaning of `sliding_window` with `layer_types`, and of what stands in its place in older files; `decoder`
has windows of all layers.
"""

from __future__ import annotations

from collections.abc import Callable

from megaswift.models.fields.rows import ConfigReading, FieldGroupRow

SLIDING = "sliding_attention"
FULL = "full_attention"
WindowedLayer = Callable[[ConfigReading, int], bool]
"""Whether a layer has a window where `layer_types` does not say it, as transformers' configuration class decides."""


def is_even_layer(_: ConfigReading, layer: int) -> bool:
    """The first layer, the third, ..."""
    return layer % 2 == 0


def windows_by_layer_row(
    windowed: WindowedLayer, default: int | None, *, switched: bool = False, keys: tuple[str, ...] = ()
) -> FieldGroupRow:
    """Windows of `sliding_window` keys (`default` where the field is absent) by `layer_types`, else by `windowed`.

    With `switched` there are none unless `use_sliding_window`. `keys` are further fields that `windowed` reads.
    """

    def read(reading: ConfigReading) -> None:
        layers = reading.layers()
        off = switched and not reading.get("use_sliding_window", bool, False)
        width = None
        if not off:
            width = reading.get("sliding_window", int, None if "sliding_window" in reading.raw else default, 0)
        if layers is None:
            return
        kinds = reading.raw.get("layer_types")
        if kinds is None:
            kinds = [SLIDING if not off and windowed(reading, i) else FULL for i in range(layers)]
        if len(kinds) != layers or set(kinds) - {SLIDING, FULL}:
            reading.problem("layer_types", f"must have {layers} entries, each {SLIDING} or {FULL}")
            return
        windows = [int(kind == SLIDING) for kind in kinds]
        if any(windows) and width == 0:
            reading.problem("sliding_window", "must be at least 1: a window holds the token itself")
        elif any(windows) and (off or not width):
            reading.problem(
                "layer_types",
                f"has {SLIDING}, but " + ("use_sliding_window is off" if off else "sliding_window is not given"),
            )
        elif any(windows) and width:
            reading.values["window_size"] = (width - 1, 0)
            if not all(windows):
                reading.values["window_attn_skip_freq"] = windows

    return FieldGroupRow(("sliding_window", "layer_types", *(("use_sliding_window",) if switched else ()), *keys), read)


def _from_layer(reading: ConfigReading, layer: int) -> bool:
    """Layers from `max_window_layers` on; none where `sliding_window` is null."""
    first = reading.get("max_window_layers", int, 28)
    return first is not None and layer >= first and reading.raw.get("sliding_window", 4096) is not None


WINDOW_BY_LAYER = windows_by_layer_row(_from_layer, 4096, switched=True, keys=("max_window_layers",))
