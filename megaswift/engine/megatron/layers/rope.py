"""Rotary position embedding by position: the frequencies of Hugging Face's own initializers, whatever the scaling.

Owns inverse frequencies and the module that stands in GPTModel's `rotary_pos_emb`. Angles come from each token's own
position, so that packing and context parallelism need no case of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megaswift.models.family import FAMILIES
from megaswift.models.spec import ArchitectureExtras, ModelSpec, RopeSpec


def inverse_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """(inv_freq float32 [rotary dim / 2], factor on cosine and sine) as the Hugging Face model computes them."""
    kind = (spec.rope.scaling or {}).get("rope_type", "default")
    if kind == "default":
        return _default(spec, spec.rope), 1.0
    raw = dict(spec.language_config)
    own_type = raw.pop("model_type")
    config = AutoConfig.for_model(FAMILIES.get(spec.family).transformers_type or own_type, **raw)
    which = {} if spec.features.rope_local is None else {"layer_type": "full_attention"}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **which)
    return inv_freq.float(), float(factor)


def windowed_layer_inv_freq(spec: ModelSpec) -> Tensor | None:
    """inv_freq of windowed layers, where it differs."""
    local = spec.features.rope_local
    assert local is None or local.scaling is None, "families with two rotary embeddings scale that of full layers only"
    return None if local is None else _default(spec, local)


def _default(spec: ModelSpec, rope: RopeSpec) -> Tensor:
    dim = int(spec.rotated_width * rope.partial)
    return 1.0 / rope.base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


class PositionRotary(nn.Module):
    """Angles [s, b, 1, d] of the positions set before the forward pass (`positions`, int64 [b, s]).

    With `local`, the frequencies of windowed layers, [s, b, 1, 2 d]: their angles after those of the full layers, in
    one tensor because recomputed layers are handed tensors only. With `query_scale` (beta, length), [s, b, 1, d + 1]:
    the factor on rotated queries after the angles. `interleaved`: pairs of neighbours turn together, else the two
    halves of a head.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        local: Tensor | None = None,
        interleaved: bool = False,
        query_scale: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        # no buffers: a buffer would be cast to bfloat16 with the module, and the angles with it
        self.frequencies = [inv_freq] if local is None else [inv_freq, local]
        self.interleaved = interleaved
        self.query_scale = query_scale
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Unused: angles follow positions, not a length."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """float32 [s, b or 1, 1, d]; b = 1 where all rows have the same positions."""
        assert self.positions is not None
        positions = self.positions.t().float()[:, :, None]
        angles: list[Tensor] = []
        for frequencies in self.frequencies:
            half = positions * frequencies  # [s, b, d / 2]
            angles += [half.repeat_interleave(2, dim=-1)] if self.interleaved else [half, half]
        if self.query_scale is not None:
            beta, length = self.query_scale
            angles.append(1 + beta * torch.log(1 + torch.floor(positions / length)))
        return torch.cat(angles, dim=-1)[:, :, None, :]


def angles_and_query_scale(rotary: Tensor, features: ArchitectureExtras) -> tuple[Tensor, Tensor | None]:
    """Take apart what `PositionRotary` returns: angles [s, b, 1, d], and the factor on rotated queries [s, b, 1, 1]
    if there is one."""
    if not features.query_scale_beta:
        return rotary, None
    return rotary[..., :-1], rotary[..., -1:]


def apply_rotary_by_position(x: Tensor, angles: Tensor, factor: float, pairs: bool) -> Tensor:
    """x [s, b, heads, d] turned by angles [s, b or 1, 1, d], times `factor`: neighbours as `pairs`, else the halves of
    d."""
    cos, sin = ((f(angles) * factor).to(x.dtype) for f in (torch.cos, torch.sin))
    if pairs:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return x * cos + turned * sin
