"""The check that all weights of a model folder are finite: one NaN makes every loss NaN, and every step is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaswift import log
from megaswift.bridge.hf.source import INDEX, SINGLE, HfSource
from megaswift.errors import Problem, WeightsError

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_NAMES = 4


def all_values_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; True for dtypes that are not checked (integers, 8 bits). Needs no
    memory."""
    if tensor.dtype not in CHECKED or tensor.is_meta or not tensor.numel():
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def check_weights_finite(weights: Iterable[tuple[str, Tensor]], what: str = "--model") -> None:
    """Raise WeightsError with the tensors that hold a value that is not finite. `what`: the option that gave them."""
    raise_for_non_finite_tensors([name for name, tensor in weights if not all_values_finite(tensor)], what)


def abbreviated_tensor_names(names: Sequence[str]) -> str:
    """List the first of these names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def raise_for_non_finite_tensors(names: Sequence[str], what: str = "--model") -> None:
    """Raise an error with these tensors; does nothing without any."""
    if names:
        raise WeightsError(
            Problem(
                what,
                f"has values that are not finite (NaN or infinity) in {abbreviated_tensor_names(names)}",
                "use a folder with the model's original weights, or a checkpoint from before training diverged",
            )
        )


def check_folder_weights_finite(folder: Path) -> None:
    """Check the safetensors files of a model, one tensor at a time, and raise WeightsError for values that are not
    finite; other files are passed over."""
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        source = HfSource(folder)
        check_weights_finite((name, source.slice(name)) for name in source.names())


def warn_non_finite_written(target: Path, names: Sequence[str]) -> None:
    """Warn that a folder was written from tensors that are not finite."""
    if names:
        log.warn(
            f"{target} has values that are not finite (NaN or infinity) in {abbreviated_tensor_names(names)}. They "
            f"were "
            "written unchanged; training and inference reject them"
        )
