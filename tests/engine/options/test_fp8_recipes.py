"""Recipes that a GPU cannot compute, and what to use instead.

Covers: megaswift/engine/options/fp8_recipes.py.
"""

from __future__ import annotations

import pytest

from megaswift.config.sections import OPTIONS
from megaswift.engine.options.fp8_recipes import FP8_NEEDS, fp8_compute_capability_problems


@pytest.mark.parametrize(
    ("recipe", "capability", "told"),
    [
        ("delayed", (8, 0), "8.9 (Ada) or newer; this GPU has 8.0\n    try: --fp8_format none"),
        ("delayed", (8, 9), ""),
        (
            "blockwise",
            (8, 9),
            "9.0 (Hopper) or newer; this GPU has 8.9\n    try: --fp8_recipe tensorwise or --fp8_recipe delayed",
        ),
        ("blockwise", (9, 0), ""),
        ("mxfp8", (9, 0), "10.0 (Blackwell) or newer; this GPU has 9.0\n    try: --fp8_recipe blockwise"),
        ("mxfp8", (12, 0), ""),
    ],
)
def test_fp8_recipes_that_a_gpu_lacks(recipe: str, capability: tuple[int, int], told: str) -> None:
    found = "".join(map(str, fp8_compute_capability_problems(recipe, capability)))
    assert told in found and bool(found) == bool(told)
    assert set(FP8_NEEDS) == set(OPTIONS["fp8_recipe"].choices)
