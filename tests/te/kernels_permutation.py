"""Routing of tokens to experts: Transformer Engine's Triton kernels by mask, as whole Python functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import python_function

TRITON = "transformer_engine.pytorch.triton.permutation:"


@python_function(TRITON + "make_row_id_map")
def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """[tokens, 2 experts + 1]: rows of the token's copies, its experts, both in the order of experts, and their
    number."""
    mask = routing_map.bool()
    counts = mask.sum(0)
    rows = mask.long().cumsum(0) - 1 + (counts.cumsum(0) - counts)
    out = torch.zeros(num_tokens, 2 * num_experts + 1, dtype=torch.int32)
    for token in range(num_tokens):
        experts = mask[token].nonzero().view(-1)
        # Transformer Engine's kernel sorts a token's copies by row, the last first; their order has no meaning
        experts = experts.flip(0)
        n = len(experts)
        out[token, :n] = rows[token, experts].int()
        out[token, num_experts : num_experts + n] = experts.int()
        out[token, -1] = n
    return out


def _copies(row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(row, token, expert) of every copy [n]."""
    slots = torch.arange(num_experts)[None] < row_id_map[:, -1:]
    tokens = torch.arange(row_id_map.shape[0])[:, None].expand_as(slots)[slots]
    rows = row_id_map[:, :num_experts][slots].long()
    experts = row_id_map[:, num_experts : 2 * num_experts][slots].long()
    return (rows if pad_offsets is None else rows + pad_offsets[experts].long()), tokens, experts


@python_function(TRITON + "permute_with_mask_map")
def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copies of the tokens by expert [out, h], of their scales, of their probabilities [out]; padding rows are 0."""
    rows, tokens, experts = _copies(row_id_map, num_experts, pad_offsets)

    def spread(source: Tensor, shape: tuple[int, ...]) -> Tensor:
        target = source.new_zeros(shape)
        target[rows] = source
        return target

    out = spread(inp[tokens], (num_out_tokens, hidden_size))
    scales = None if scale is None else spread(scale[tokens], (num_out_tokens, scale_hidden_dim))
    if probs is None:
        return out, scales, None
    chosen = probs[tokens, experts] if probs.dim() == 2 else probs[tokens]
    return out, scales, spread(chosen, (num_out_tokens,))


@python_function(TRITON + "unpermute_with_mask_map")
def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sums [tokens, h] of the copies, weighted where `merging_probs` [tokens, experts] are given; probabilities
    [tokens, experts] from those of the copies."""
    rows, tokens, experts = _copies(row_id_map, num_experts, pad_offsets)
    copies = inp[rows].float()
    if merging_probs is not None:
        copies = copies * merging_probs[tokens, experts].float()[:, None]
    out = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, copies).to(inp.dtype)
    if permuted_probs is None:
        return out, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return out, probs


@python_function(TRITON + "unpermute_with_mask_map_bwd_with_merging_probs")
def unpermute_with_mask_map_bwd_with_merging_probs(
    grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """(gradient of the copies [out, h], of the merging probabilities [tokens, experts])."""
    rows, tokens, experts = _copies(row_id_map, num_experts, pad_offsets)
    copies = grad.new_zeros(num_out_tokens, hidden_size)
    copies[rows] = (grad[tokens].float() * merging_probs[tokens, experts].float()[:, None]).to(grad.dtype)
    probs = merging_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = (grad[tokens].float() * fwd_input[rows].float()).sum(-1).to(probs.dtype)
    return copies, probs


@python_function(TRITON + "make_chunk_sort_map")
def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """The new row [tokens] of each row, when chunks of `split_sizes` are put in the order `sorted_indices`."""
    starts = split_sizes.long().cumsum(0) - split_sizes.long()
    out, at = torch.zeros(num_tokens, dtype=torch.int32), 0
    for chunk in sorted_indices.tolist():
        n = int(split_sizes[chunk])
        out[int(starts[chunk]) : int(starts[chunk]) + n] = torch.arange(at, at + n, dtype=torch.int32)
        at += n
    return out


@python_function(TRITON + "sort_chunks_by_map")
def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Any, ...]:
    """Rows [tokens, h] and probabilities [tokens] to their new places, or back."""
    rows = row_id_map.long()

    def moved(source: Tensor) -> Tensor:
        if not is_forward:
            return source[rows]
        target = torch.empty_like(source)
        target[rows] = source
        return target

    return moved(inp), None if probs is None else moved(probs)
