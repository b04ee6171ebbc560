"""Self-attention of families that change queries after their rotation, of both layer specs.

Owns norms of rotated queries and keys (Hunyuan) and the factor on queries that grows with the position (Ministral 3).
Megatron-Core's SelfAttention rotates last, so this one rotates queries and keys itself, by each token's own position,
and hands Megatron-Core's no angles.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megaswift.engine.megatron.layers.rope import angles_and_query_scale, apply_rotary_by_position


class RotatedSelfAttention(SelfAttention):
    """Rotates, then normalizes queries and keys and scales queries, as the model's features ask."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._rotary: Tensor | None = None
        self.norms_rotated = config.features.qk_norm_rotated
        if self.norms_rotated:
            # under other names, for Megatron-Core applies its own before the rotation; with the old ones in them, by
            # which it finds the gradients that tensor-parallel ranks have to sum
            for name in ("q_layernorm", "k_layernorm"):
                self.add_module(f"rotated_{name}", getattr(self, name))
                setattr(self, name, None)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s / cp (/ tp), b, h], what `PositionRotary` returns, to (output, bias)."""
        self._rotary = rotary_pos_emb
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """[s / cp, b, heads, d] each, as attention takes them."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        rotary = self._rotary
        self._rotary = None
        assert rotary is not None
        config = self.config
        angles, scale = angles_and_query_scale(rotary, config.features)
        query, key = (
            apply_rotary_by_position(x, angles, config.rope_factor, config.rotary_interleaved) for x in (query, key)
        )
        if self.norms_rotated:
            query = self.rotated_q_layernorm(query)
            key = self.rotated_k_layernorm(key)
        if scale is not None:
            query = query * scale.to(query.dtype)
        return query, key, value
