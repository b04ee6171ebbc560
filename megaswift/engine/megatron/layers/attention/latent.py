"""Multi-head latent attention of both layer specs, rotated by each token's own position (DeepSeek-V2, arXiv:2405.04434,
section 2.1).

Owns how queries, keys and values are made from the compressed ones. Megatron-Core's MLASelfAttention makes rotary
angles itself, from 0 on for the rows of a batch; here they come from outside as with other attention, so that packed
rows, context parallelism and any rope scaling need no case of their own. The gradient of the keys' shared rotary part
is summed over tensor-parallel ranks, which Megatron-Core leaves out without sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megaswift.engine.megatron.layers.rope import angles_and_query_scale, apply_rotary_by_position

NORM_EPSILON = 1e-6
"""The epsilon of the norms of compressed queries and keys: transformers and the models' authors set it apart from
`rms_norm_eps`."""


class _ByPosition(MLASelfAttention):
    """MLASelfAttention that takes rotary angles as other attention does."""

    def _settle(self) -> None:
        """After construction: our angles, and the epsilon of the norms that the second projections begin with."""
        del self.rotary_pos_emb
        self._rotary: Tensor | None = None
        for product in ("linear_q_up_proj", "linear_kv_up_proj"):
            if hasattr(self, product):
                getattr(self, product).eps = NORM_EPSILON

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """hidden_states [s / cp (/ tp), b, h], what `PositionRotary` returns, to (output, bias)."""
        self._rotary = rotary_pos_emb
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """[s, b, heads, d] each, d of values apart; [t, heads, d] where Transformer Engine wants packed rows so."""
        c = self.config
        rotary = self._rotary
        self._rotary = None
        assert rotary is not None and inference_context is None
        angles, scale = angles_and_query_scale(rotary, c.features)
        if c.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.linear_q_down_proj(hidden_states)[0])
        low, turning = self.linear_kv_down_proj(hidden_states)[0].split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        if c.sequence_parallel:
            turning = gather_from_sequence_parallel_region(turning, group=self.tp_group)
        else:
            # its gradient is a sum over tensor-parallel ranks, each of which has other heads; Megatron-Core (0.16 to
            # 0.19) sums it with sequence parallelism only, and is 8% off without
            turning = copy_to_tensor_model_parallel_region(turning, group=self.tp_group)
        both, _ = self.linear_kv_up_proj(low)
        heads = self.num_attention_heads_per_partition
        still, turned = query.unflatten(-1, (heads, self.q_head_dim)).split(
            [c.qk_head_dim, c.qk_pos_emb_head_dim], dim=-1
        )
        key, value = both.unflatten(-1, (heads, c.qk_head_dim + c.v_head_dim)).split(
            [c.qk_head_dim, c.v_head_dim], dim=-1
        )
        query = torch.cat(
            [still, apply_rotary_by_position(turned, angles, c.rope_factor, c.features.latent_pairs)], dim=-1
        )
        if scale is not None:
            query = query * scale.to(query.dtype)
        turning = apply_rotary_by_position(turning.unsqueeze(-2), angles, c.rope_factor, c.features.latent_pairs)
        key = torch.cat([key, turning.expand(-1, -1, heads, -1)], dim=-1)
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        return query, key, value, None, None


class TorchLatentAttention(_ByPosition):
    """Latent attention of the torch layer spec. Its modules are built here: Megatron's constructor takes none but its
    own for the first projections."""

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, layer_number: int, **kwargs: Any) -> None:
        MultiLatentAttention.__init__(self, config, submodules, layer_number, attention_type="self", **kwargs)
        heads = config.num_attention_heads
        hidden = config.hidden_size
        pair = config.qk_head_dim + config.v_head_dim
        common = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "gather_output": False,
            "tp_group": self.tp_group,
        }
        if config.q_lora_rank is None:
            self.linear_q_proj = submodules.linear_q_proj(hidden, heads * self.q_head_dim, **common)
        else:
            self.linear_q_down_proj = submodules.linear_q_down_proj(hidden, config.q_lora_rank, config)
            self.linear_q_up_proj = submodules.linear_q_up_proj(config.q_lora_rank, heads * self.q_head_dim, **common)
        self.linear_kv_down_proj = submodules.linear_kv_down_proj(
            hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config
        )
        self.linear_kv_up_proj = submodules.linear_kv_up_proj(config.kv_lora_rank, heads * pair, **common)
        self._settle()


class TELatentAttention(_ByPosition):
    """Latent attention of Transformer Engine's spec."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settle()

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The spec's own modules: Megatron-Core 0.19 would put a norm before an uncompressed query projection."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class ReplicatedLinear(nn.Module):
    """x W^T with the whole W on every tensor-parallel rank: x [s, b, h] (a sequence shard under SP) to [s, b, out]."""

    def __init__(self, input_size: int, output_size: int, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(output, no bias)."""
        return self._forward_impl(x, self.weight), None

    def _forward_impl(self, input: Tensor, weight: Tensor) -> Tensor:
        """The product alone, under the name that Megatron-Core's linear layers have for theirs."""
        return F.linear(input, weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The same on every rank."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )
