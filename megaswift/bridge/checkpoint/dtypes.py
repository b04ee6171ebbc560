"""Which dtypes a tensor of a checkpoint may be read as, for the checkpoints of both engines."""

from __future__ import annotations

import torch

from megaswift.errors import Problem


def saved_dtype_problem(name: str, saved: torch.dtype, expected: torch.dtype, state: bool) -> Problem | None:
    """Return why a tensor saved in one dtype cannot be read as another; None where it can.

    Weights are read between floating dtypes, an optimizer's `state` only where nothing is lost.
    """
    floating = saved.is_floating_point and expected.is_floating_point
    if saved == expected or (floating and (not state or torch.promote_types(saved, expected) == expected)):
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (saved, expected)]
    return Problem(
        name,
        f"has dtype {names[0]} in the checkpoint and {names[1]} in this run",
        "use the optimizer options of the checkpoint's run, or --model STEP to start from its weights",
    )
