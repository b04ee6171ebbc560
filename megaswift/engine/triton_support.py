"""Whether Triton kernels can run: on a tensor, and in this process at all. No torch."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from megaswift import log
from megaswift.diagnosis.c_compiler import FIX, missing_for_triton

if TYPE_CHECKING:
    from torch import Tensor


def runs_triton_kernels(tensor: Tensor) -> bool:
    """Return whether this is a GPU where Triton can launch kernels."""
    return tensor.is_cuda and triton_launches()


@functools.cache
def triton_launches() -> bool:
    """Return whether Triton can launch kernels in a process with a GPU; warns once where it cannot."""
    missing = missing_for_triton(os.environ)
    if missing:
        log.warn(f"no Triton kernels and no torch.compile, so training is slower: {missing}; {FIX}")
    return not missing
