"""Weights of a model folder are finite numbers: one NaN makes every loss NaN, and no step is ever taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megaswift.errors import Problem, WeightsError

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_NAMES = 4


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is finite; True for dtypes that are not checked (integers, 8 bits). Needs no memory."""
    if tensor.dtype not in CHECKED or tensor.is_meta or not tensor.numel():
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def check(weights: Iterable[tuple[str, Tensor]]) -> None:
    """WeightsError that names the tensors with a value that is not finite."""
    refuse([name for name, tensor in weights if not is_finite(tensor)])


def refuse(names: list[str]) -> None:
    """The message about these tensors; none where there is no name."""
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise WeightsError(
            Problem(
                "--model",
                f"holds values that are not finite (NaN or infinity) in {', '.join(names[:MOST_NAMES])}{more}",
                "a folder with the model's original weights, or a checkpoint from before the training diverged",
            )
        )
