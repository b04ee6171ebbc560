"""Rules for the dynamic loss scale of float16. Its options are in `config/parts/optimizer.py`."""

from __future__ import annotations

import math

from megaswift.config.rule import ConflictingOptions
from megaswift.config.sections import Sections

_POWER = "must be a power of two, which multiplies and divides without rounding"


def _is_power_of_two(c: Sections, name: str) -> bool:
    return math.log2(c.value(name)).is_integer()


LOSS_SCALE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("initial_loss_scale",),
        lambda c: not _is_power_of_two(c, "initial_loss_scale"),
        _POWER,
        "--initial_loss_scale 65536",
    ),
    ConflictingOptions(
        ("min_loss_scale",), lambda c: not _is_power_of_two(c, "min_loss_scale"), _POWER, "--min_loss_scale 1"
    ),
    ConflictingOptions(
        ("initial_loss_scale", "min_loss_scale"),
        lambda c: c.optim.initial_loss_scale < c.optim.min_loss_scale,
        "is less than min_loss_scale {min_loss_scale}",
        "--min_loss_scale 1",
    ),
)
