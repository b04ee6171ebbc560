"""From logits to the next token of each row: penalty, temperature, top-k, top-p, min-p, and a draw by one uniform
number a row.

The sets that filters leave are those of transformers' warpers. The uniform number is an argument, so that no row
depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaswift.rollout.sampler import SamplingParams

BLOCK = 128
"""Uniform numbers that a row's generator gives at a time: always so many, so that the n-th is the same for every
length."""
LARGEST = 1 - 2.0**-40
"""Of the uniform numbers, so that their product with a sum stays below the sum."""
PART, FEW = 128, 1024
"""Columns whose sum is looked at first, so that running sums over a whole vocabulary are not needed; vocabularies that
need no parts."""


class RowGenerators:
    """A generator for each row, and its numbers of the present block of steps. On the CPU, whatever the model is on."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device
        self.block = torch.empty(0)

    def at(self, step: int) -> Tensor:
        """[rows] float64 in [0, 1), for the token of this step; steps are asked for one after the other."""
        if step % BLOCK == 0:
            numbers = [torch.rand(BLOCK, generator=g, dtype=torch.float64) for g in self.generators]
            self.block = torch.stack(numbers, 1).clamp_(max=LARGEST).to(self.device)  # [BLOCK, rows]
        return self.block[step % BLOCK]

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows only."""
        self.generators = [self.generators[i] for i in rows.tolist()]
        self.block = self.block[:, rows]


def filter_logits(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """`scores` [b, V] with -inf for what top-k, then top-p, then min-p leave out."""
    out = float("-inf")
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], out)
    if sampling.top_p < 1:
        ascending, order = scores.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False  # the likeliest stays
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), out)
    if sampling.min_p > 0:
        chances = scores.softmax(-1)
        drop = chances < sampling.min_p * chances.amax(-1, keepdim=True)
        scores = scores.masked_fill(drop, out)
    return scores


def part_sums(weights: Tensor) -> Tensor:
    """[b, parts] float64: sums of `weights` [b, V] in parts of PART columns; one part where they are few."""
    count = weights.shape[-1]
    if count <= FEW:
        return weights.sum(-1, keepdim=True, dtype=torch.float64)
    rest = count % PART
    sums = weights[:, : count - rest].unflatten(1, (-1, PART)).sum(-1)
    return (torch.cat([sums, weights[:, count - rest :].sum(-1, keepdim=True)], 1) if rest else sums).double()


def _passed(weights: Tensor, uniform: Tensor) -> Tensor:
    """[b, 1]: the column at which the running sum of `weights` [b, n] passes the share `uniform` [b] of their sum."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)
    return found.clamp_(max=weights.shape[-1] - 1)  # only where weights are not finite


def draw_tokens(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """[b]: tokens by their `weights` [b, V], of which `sums` are the `part_sums`: first the part, then the token in
    it."""
    if sums.shape[-1] == 1:
        return _passed(weights, uniform)[:, 0]
    part = _passed(sums, uniform)
    own, edge = sums.gather(1, part)[:, 0], sums.cumsum(-1)
    within = (uniform * edge[:, -1] - (edge.gather(1, part)[:, 0] - own)) / own
    columns = part * PART + torch.arange(PART, device=weights.device)  # [b, PART]
    inside = weights.gather(1, columns.clamp(max=weights.shape[-1] - 1)).masked_fill(columns >= weights.shape[-1], 0)
    return columns.gather(1, _passed(inside, within.clamp(0, LARGEST)))[:, 0].clamp_(max=weights.shape[-1] - 1)


def choose_tokens(
    logits: Tensor, sampling: SamplingParams, uniform: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(tokens [b], their log-probabilities [b]) from logits [b, V]. `seen` [b, V]: tokens that are penalised."""
    logits = logits.float()
    scores = logits if sampling.scale == 1 else logits / sampling.scale
    wanted = scores
    if seen is not None:
        penalty = sampling.repetition_penalty
        wanted = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    sums = part_sums(weights)
    total = sums.sum(-1)
    if uniform is None:
        tokens = wanted.argmax(-1)
    else:
        wanted = filter_logits(wanted, sampling)
        if wanted is not scores:
            weights = wanted.softmax(-1)
            sums = part_sums(weights)
        tokens = draw_tokens(weights, sums, uniform)
    return tokens, ((scores.gather(1, tokens[:, None]) - top)[:, 0] - total.log()).float()
