"""Norms of the torch layer spec, with the same parameter names as in the Transformer Engine spec.

`TorchNorm` stands alone; `NormColumnParallelLinear` is a norm followed by a column-parallel product, with the norm's
weight as `layer_norm_weight`, so that both specs write the same checkpoint. The weights know sequence parallelism:
their gradients are summed over the tensor-parallel group where each rank saw a part of the sequence.
`AllHeadsQueryNorm` and `AllHeadsKeyNorm` normalize over the heads of all tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 (Zhang & Sennrich 2019, arXiv:1910.07467).

    `centered`: times 1 + weight, the product rounded last, as Gemma does.
    """
    if centered:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, eps) * (1.0 + weight.float())).to(x.dtype)
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return weight * F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class TorchNorm(nn.Module):
    """RMSNorm or LayerNorm of the last dimension, `weight` [h]."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.kind = config.normalization
        self.centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = (
            nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)) if self.kind == "LayerNorm" else None
        )
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        if self.kind == "RMSNorm":
            return rms_norm(x, self.weight, self.eps, self.centered)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class QKNorm(TorchNorm):
    """Norm of each head's query or key. Heads lie on tensor-parallel ranks, so its gradient is always summed over
    them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        for p in self.parameters():
            p.sequence_parallel = config.tensor_model_parallel_size > 1


class NormColumnParallelLinear(ColumnParallelLinear):
    """norm(x) W^T with W split by rows: x [s, b, h] (a sequence shard under SP) to [s, b, out / tp]."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.kind = config.normalization
        self.centered = config.layernorm_zero_centered_gamma
        self.return_layernorm_output = False  # Transformer Engine's name: adapters read what the product reads
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        if self.kind == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        """(output, bias to be added later or None); for adapters ((output, normed input), bias)."""
        if self.kind == "RMSNorm":
            normed = rms_norm(input_, self.layer_norm_weight, self.eps, self.centered)
        else:
            normed = F.layer_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.layer_norm_bias, self.eps)
        out, bias = super().forward(normed, *args, **kwargs)
        return ((out, normed) if self.return_layernorm_output else out), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The product's shards by rows, the norm whole."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce; each rank uses the sum for outputs of its own, so the gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over the heads of all ranks together, in float32: `weight` [heads / tp x d]. The attention module sets
    `group`."""

    group: dist.ProcessGroup

    def __init__(self, config: Any, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps = eps
        self.width = heads * hidden_size
        width = self.width // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads / tp, d], the same shape back."""
        flat = x.flatten(2).float()
        squares = flat.square().sum(dim=-1, keepdim=True)
        if self.group.size() > 1:
            squares = _SumOverRanks.apply(squares, self.group)
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight.float() * normed).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Cut by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class AllHeadsQueryNorm(AllHeadsRMSNorm):
    """The norm over all heads of the queries."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_attention_heads)


class AllHeadsKeyNorm(AllHeadsRMSNorm):
    """The norm over all heads of the keys."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_query_groups)
