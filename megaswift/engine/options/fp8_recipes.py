"""What GPUs the FP8 recipes need. No torch."""

from __future__ import annotations

from megaswift.errors import Problem

FP8_NEEDS = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Recipe -> the least compute capability with which Transformer Engine computes it (`check_fp8_support` and its
neighbours)."""
FP8_NAMES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def fp8_compute_capability_problems(recipe: str, capability: tuple[int, int], gpu: str = "this GPU") -> list[Problem]:
    """Report why a GPU of this compute capability cannot run an FP8 recipe; Transformer Engine itself would say so in
    the first step."""
    least = FP8_NEEDS[recipe]
    if capability >= least:
        return []
    fits = [name for name, needed in FP8_NEEDS.items() if capability >= needed]
    rule = (
        f"needs compute capability {least[0]}.{least[1]} ({FP8_NAMES[least]}) or newer; {gpu} has "
        f"{capability[0]}.{capability[1]}"
    )
    return [
        Problem(
            f"--fp8_recipe {recipe}",
            rule,
            " or ".join(f"--fp8_recipe {name}" for name in reversed(fits)) or "--fp8_format none",
        )
    ]
