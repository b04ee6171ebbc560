"""Attention with a learned sink in each head's softmax, by PyTorch's fused kernels.

gpt-oss (arXiv:2508.10925): probabilities are exp(score) / (sum of exp(score) + exp(sink)), so that a head may look at
nothing. Owns the sink as one more key whose score is the sink whatever the query, and whose value is zero; windows and
documents are the caller's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 8
"""Columns added to queries and keys, of which one is used: fused kernels want head sizes in multiples of 8."""


def sink_attention(
    qkv: tuple[Tensor, Tensor, Tensor], sink: Tensor, scale: float, mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """[b, h, s, d] from q [b, h, s, d], k and v [b, h, n, d], sink [h]; `mask` bool [s, n], True where seen, None:
    plain causal."""
    q, k, v = qkv
    b, d = q.shape[0], q.shape[3]
    lanes = q.new_zeros(LANES)
    lanes[0] = 1.0
    q = torch.cat([q, lanes.expand(*q.shape[:-1], LANES)], dim=-1)
    # [h, d + lanes]: times the query's 1 and the scale
    score = F.pad((sink.float() / scale).to(q.dtype)[:, None], (d, LANES - 1))
    k = torch.cat([score[None, :, None].expand(b, -1, -1, -1), F.pad(k, (0, LANES))], dim=2)
    v = F.pad(v, (0, LANES, 1, 0))
    if mask is None:  # a query that sees the sink alone keeps the diagonal in place
        q = F.pad(q, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
    )
    return out[:, :, int(mask is None) :, :d]
