"""Megatron-Core 0.16's permutation of tokens to experts without waits of the host for the device.

Without Transformer Engine's kernel 0.16 selects by boolean masks, whose counts the host reads from the device: two
waits in each layer and micro-batch, again where a layer is recomputed. Their number is known: the dispatcher hands it
on. From 0.17 Megatron-Core does without the waits itself, by a stable sort of all tokens x experts.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Permuted = tuple[Tensor, Tensor | None, Tensor]
Permute = Callable[..., Permuted]


def unsynced_permute(fallback: Permute) -> Permute:
    """In place of `megatron.core.transformer.moe.moe_utils.permute`, which is the `fallback` for its other cases."""

    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | Tensor | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Permuted:
        """Tokens [t, h] in the order of their experts [n, h], their probabilities [n] and places [n]; from a boolean
        map [t, e] with `num_out_tokens` = n true values, and probabilities [t, e]."""
        if fused or drop_and_pad or num_out_tokens is None:
            return fallback(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
        chosen = routing_map.T.reshape(-1).nonzero_static(size=int(num_out_tokens)).squeeze(1)
        places = chosen % len(tokens)
        permuted = None if probs is None else probs.T.reshape(-1).index_select(0, chosen)
        return tokens.index_select(0, places), permuted, places

    return permute
