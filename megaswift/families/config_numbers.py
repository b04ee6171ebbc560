"""Numbers of a config.json that no model can have, whatever its family: checked before anything reads them.

A layer norm's epsilon of NaN makes every output NaN, and a rotary base of 0 divides by zero; both would train, and
learn nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megaswift.errors import Problem

BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "global_rope_theta", "local_rope_theta")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
POSITIVE = {**dict.fromkeys(BASES, "10000.0"), **dict.fromkeys(EPSILONS, "1e-06")}
"""Key -> a usual value."""


def number_problems(raw: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Every such number, in nested mappings too (`rope_parameters`, `text_config`)."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from number_problems(value, f"{prefix}{key}.")
        elif value is not None and key in POSITIVE and not _positive(value):
            yield Problem(f"config.json, {prefix}{key}: {value}", "must be a finite number above 0", POSITIVE[key])


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
