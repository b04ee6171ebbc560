"""SwiGLU of the torch layer spec: one gradient buffer in place of Megatron's generic gated unit, which is a quarter slower on a CPU.

Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _SwiGLU(torch.autograd.Function):
    """[..., 2 f] = [gate, up] to silu(gate) * up [..., f]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return out


class SwiGLU(nn.Module):
    """silu(gate) * up of the joined projection [..., 2 f]."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 f] to [..., f]."""
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        """Nothing to save; Megatron's MLP asks every part."""
        return {}
