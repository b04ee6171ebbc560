"""What selective recomputation covers where nothing is said."""

from __future__ import annotations

from megaswift.config import SwiftConfig
from megaswift.models.options.model import selective_recompute_modules

SELECTIVE = SwiftConfig(task="sft", recompute_granularity="selective")


def test_mlps_and_experts() -> None:
    """Not attention, which keeps no scores, but where it is not fused."""
    assert selective_recompute_modules(SELECTIVE.model, (False, False)) == ("mlp",)
    assert selective_recompute_modules(SELECTIVE.model, (True, True)) == ("moe",)
    assert selective_recompute_modules(SELECTIVE.model, (False, True)) == ("mlp", "moe")
    assert selective_recompute_modules(SELECTIVE.replace(attn_impl="unfused").model, (False,)) == ("core_attn",)


def test_what_the_user_says() -> None:
    assert selective_recompute_modules(SELECTIVE.replace(recompute_modules=("core_attn",)).model, (False,)) == (
        "core_attn",
    )
    assert selective_recompute_modules(SwiftConfig(task="sft").model, (False,)) == ()
