"""Attention whose scores pass a soft cap, cap x tanh(score / cap), before the softmax (Gemma 2, arXiv:2408.00118,
section 2.2).

Owns the product for one run of queries. PyTorch's fused kernel has no cap, so this is written out: queries go in
chunks, each over the keys that its window leaves, and the backward pass computes a chunk's scores again. Nothing of
size queries x keys is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 26
"""Float32 scores of one chunk of queries, at most."""


@dataclass(frozen=True)
class SoftcapScores:
    """How scores are made of queries and keys."""

    scale: float
    cap: float
    offset: int
    """Query i stands at key position offset + i."""
    window: int | None
    """How many keys a query sees, itself among them; None: all before it."""

    def chunks(self, query: Tensor, keys: int) -> Iterator[tuple[slice, slice]]:
        """(queries, the keys that any of them sees)."""
        b, h, queries, _ = query.shape
        rows = max(1, CHUNK_BYTES // (4 * b * h * keys))
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low = 0 if self.window is None else max(0, self.offset + first - self.window + 1)
            yield slice(first, last), slice(low, min(keys, self.offset + last))

    def probabilities(self, query: Tensor, key: Tensor, rows: slice, seen: slice) -> tuple[Tensor, Tensor]:
        """(probabilities, tanh of the scores / cap), float32 [b, h, rows, seen]."""
        capped = torch.tanh((query[:, :, rows] @ key[:, :, seen].transpose(-1, -2)).float() * (self.scale / self.cap))
        positions = torch.arange(rows.start, rows.stop, device=query.device)[:, None] + self.offset
        keys = torch.arange(seen.start, seen.stop, device=query.device)[None]
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys <= positions - self.window
        return (capped * self.cap).masked_fill(hidden, float("-inf")).softmax(dim=-1), capped


class SoftCappedAttention(torch.autograd.Function):
    """query [b, h, q, d], key and value [b, h, k, d] to [b, h, q, d]; every query sees at least itself."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: SoftcapScores) -> Tensor:
        """Keeps its inputs only."""
        ctx.save_for_backward(query, key, value)
        ctx.scores = scores
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for rows, seen in scores.chunks(query, key.shape[2]):
            probs, _ = scores.probabilities(query, key, rows, seen)
            out[:, :, rows] = probs.to(value.dtype) @ value[:, :, seen]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Each chunk's probabilities again, then softmax, cap and product backwards; sums over chunks in float32."""
        query, key, value = ctx.saved_tensors
        scores: SoftcapScores = ctx.scores
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (key, value))
        for rows, seen in scores.chunks(query, key.shape[2]):
            probs, capped = scores.probabilities(query, key, rows, seen)
            part = grad[:, :, rows]
            d_value[:, :, seen] += probs.to(part.dtype).transpose(-1, -2) @ part
            d_probs = (part @ value[:, :, seen].transpose(-1, -2)).float()
            d_probs -= (d_probs * probs).sum(dim=-1, keepdim=True)
            d_scores = (d_probs.mul_(probs) * (1 - capped.square()) * scores.scale).to(query.dtype)
            d_query[:, :, rows] = d_scores @ key[:, :, seen]
            d_key[:, :, seen] += d_scores.transpose(-1, -2) @ query[:, :, rows]
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None
