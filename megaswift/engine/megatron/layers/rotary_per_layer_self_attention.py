"""Self-attention of families with two rotary embeddings, or with norms over all heads together.

Owns what they need beyond Megatron-Core's module, for the torch layer spec: which rotary embedding a layer takes, and
the process group of norms over all heads (`norm.py`). Other families use Megatron-Core's own.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megaswift.engine.megatron.layers.norm import AllHeadsRMSNorm
from megaswift.engine.megatron.layers.torch_attention import window_of_layer


class RotaryPerLayerSelfAttention(SelfAttention):
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
