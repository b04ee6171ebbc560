"""Gathers of block-scaled tensors over sequence-parallel ranks: Transformer Engine's own, one collective after
another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from tests.te.registry import around_python_function

DISTRIBUTED = "transformer_engine.pytorch.distributed:"


@around_python_function(DISTRIBUTED + "_start_all_gather_fp8_blockwise")
@around_python_function(DISTRIBUTED + "_all_gather_mxfp8")
def without_coalescing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Data and scales are exchanged by one coalesced call, which NCCL has and gloo has not."""
    from megaswift.engine.megatron.cpu.cuda_stubs import coalescing

    with patch.object(torch.distributed, "_coalescing_manager", coalescing):
        return function(*args, **kwargs)
