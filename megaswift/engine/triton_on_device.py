"""Whether Triton kernels can run on a tensor."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def runs_triton_kernels(tensor: Tensor) -> bool:
    """On a GPU, with the package triton, which comes with the CUDA builds of torch."""
    return tensor.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
