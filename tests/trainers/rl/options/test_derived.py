"""Values that follow from several options.

Covers: megaswift/trainers/rl/options/derived.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.trainers.rl.options.derived import interrupts_completions


@pytest.mark.parametrize(
    ("options", "images", "interrupts"),
    [
        ({}, False, False),
        ({"async_generation": True}, False, False),
        ({"max_staleness": 2}, False, False),
        ({"max_staleness": 3}, False, True),
        ({"max_staleness": 3, "staleness_strategy": "drop", "sampler_engines": 2}, False, True),
        ({"max_staleness": 3, "partial_rollouts": False}, False, False),
        ({"max_staleness": 3, "environment": "world.py:Count"}, False, False),
        ({"max_staleness": 3}, True, False),
    ],
)
def test_new_weights_interrupt_what_is_under_way(options: dict[str, Any], images: bool, interrupts: bool) -> None:
    """A generation takes two steps here. Without the option, wherever completions can go on with other weights."""
    assert interrupts_completions(SwiftConfig(task="grpo", **options), 2, images) is interrupts
