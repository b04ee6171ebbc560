"""Precision of a reference model: a wider dtype, and sums in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Computes in float64 what a model computes in float32 whatever its dtype: norms, angles, routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let calls that name float32 name float64."""
        if func is Tensor.float:
            return Tensor.double(*args)
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*wide, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


class ReorderedSums(TorchFunctionMode):
    """Adds up products in another order, which rounds differently: some gradients are sums that nearly cancel, whose
    rounding errors do not come from their inputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Exchange columns of inputs and of matrices alike."""
        if func is F.linear:
            order = torch.randperm(args[0].shape[-1], generator=self.generator)
            args = (args[0][..., order], args[1][:, order], *args[2:])
        return func(*args, **(kwargs or {}))
