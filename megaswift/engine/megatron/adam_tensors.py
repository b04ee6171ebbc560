"""What an update of Adam reads and writes, by torch or by a Triton kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class AdamTensors(NamedTuple):
    """A parameter's, of one shape, each contiguous."""

    gradient: Tensor
    weight: Tensor
    main: Tensor | None
    """Main weights in float32, or what a bfloat16 weight lacks of them (int16); None where the weight is its own."""
    first: Tensor
    """Moments, float32 or bfloat16."""
    second: Tensor


class AdamRule(NamedTuple):
    """Numbers of the host, each a float32."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


LaunchTables = dict[Any, Any]
"""For the parameters that are updated together: by kind, their addresses and the kernel's table of them."""
