"""Self-attention of families with two rotary embeddings, or with norms over all heads together.

Owns what they need beyond Megatron-Core's module, for the torch layer spec: which rotary embedding a layer takes, and
the reduction of a norm whose heads lie on several ranks. Other families use Megatron-Core's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megaswift.engine.megatron.layers.torch_attention import window_of_layer


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
        self.eps, self.width = eps, heads * hidden_size
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
    """Of the queries."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_attention_heads)


class AllHeadsKeyNorm(AllHeadsRMSNorm):
    """Of the keys."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_query_groups)


class LayerRotarySelfAttention(SelfAttention):
    """Megatron-Core's self-attention with the rotary embedding of its kind of layer, and norms that know their
    group."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.two_rotaries = config.features.rope_local is not None
        self.windowed = window_of_layer(config, self.layer_number) is not None
        # only full layers are scaled: yarn's factor on cosine and sine is theirs
        if self.two_rotaries and self.windowed:
            self.config = copy.copy(config)
            self.config.yarn_rotary_scaling_factor = 1.0  # Megatron-Core 0.16 asks the configuration in each pass,
            self._yarn_concentration_factor = 1.0  # 0.19 has asked it by now
        for norm in (self.q_layernorm, self.k_layernorm):
            if isinstance(norm, AllHeadsRMSNorm):
                norm.group = self.pg_collection.tp

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`rotary_pos_emb` [s, b, 1, d], or [s, b, 1, 2 d]: angles of full layers, then of windowed ones."""
        if self.two_rotaries and rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[int(self.windowed)]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
