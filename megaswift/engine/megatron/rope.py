"""Rotary position embedding by position: the frequencies of Hugging Face's own initialisers, whatever the scaling.

Owns inverse frequencies and the module that stands in GPTModel's `rotary_pos_emb`. Angles come from each token's own position,
so that packing and context parallelism need no case of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megaswift.families.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """(inv_freq float32 [rotary dim / 2], factor on cosine and sine) as the Hugging Face model computes them."""
    dim = int(spec.head_dim * spec.rope.partial)
    kind = (spec.rope.scaling or {}).get("rope_type", "default")
    if kind == "default":
        return 1.0 / spec.rope.base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
    raw = dict(spec.hf_config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(factor)


class PositionRotary(nn.Module):
    """Angles [s, b, 1, d] of the positions set before the forward pass (`positions`, int64 [b, s])."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # no buffer: a buffer would be cast to bfloat16 with the module, and the angles with it
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Unused: angles follow positions, not a length."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """float32 [s, b or 1, 1, d]; b = 1 where all rows have the same positions."""
        assert self.positions is not None
        angles = self.positions.t().float()[:, :, None] * self.inv_freq  # [s, b, d / 2]
        return torch.cat([angles, angles], dim=-1)[:, :, None, :]
