"""Samples the next token of each row from logits: repetition penalty, temperature, top-k, top-p, min-p, and inverse
transform sampling with one uniform number per row.

The filters keep the same tokens as transformers' warpers. The uniform number is an argument, so that rows are
independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaswift.device_copy import copy_to_device_async
from megaswift.rollout.sampler import SamplingParams

BLOCK = 128
"""Uniform numbers drawn from a row's generator at a time: fixed, so that the n-th number does not depend on the
length."""
LARGEST = 1 - 2.0**-40
"""Upper bound of the uniform numbers, so that their product with a sum stays below the sum."""
PART = 128
"""Columns per part: the part is drawn first, which avoids cumulative sums over the whole vocabulary."""
FEW = 1024
"""Vocabularies of up to this many tokens are one part."""


class RowGenerators:
    """A generator per row and its numbers for the current block of steps. Drawn on the CPU, whatever the model's
    device."""

    def __init__(self, seeds: Sequence[int], device: torch.device, drawn: Sequence[int] | None = None) -> None:
        """`drawn`: how many numbers of each row earlier calls have used."""
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device
        self.block = torch.empty(0)
        self.left = [torch.empty(0, dtype=torch.float64)] * len(seeds)
        """Numbers of each row that are drawn and not in the block."""
        for row, count in enumerate(drawn or ()):
            for _ in range(-(-count // BLOCK)):
                self.left[row] = self._draw(row)
            self.left[row] = self.left[row][count % BLOCK or BLOCK :]

    def _draw(self, row: int) -> Tensor:
        return torch.rand(BLOCK, generator=self.generators[row], dtype=torch.float64)

    def at(self, step: int) -> Tensor:
        """[rows] float64 in [0, 1), for the token of this step; steps must be consecutive."""
        if step % BLOCK == 0:
            numbers = [torch.cat([self.left[row], self._draw(row)]) for row in range(len(self.generators))]
            self.left = [some[BLOCK:] for some in numbers]
            drawn = torch.stack([some[:BLOCK] for some in numbers], 1).clamp_(max=LARGEST)
            self.block = copy_to_device_async(drawn, self.device)  # [BLOCK, rows]
        return self.block[step % BLOCK]

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, ascending)."""
        kept = rows.tolist()
        self.generators = [self.generators[i] for i in kept]
        self.left = [self.left[i] for i in kept]
        self.block = self.block[:, rows]


def filter_logits(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """`scores` [b, V] with -inf for tokens removed by top-k, then top-p, then min-p."""
    out = float("-inf")
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], out)
    if sampling.top_p < 1:
        ascending, order = scores.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False  # the likeliest stays
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), out)
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        drop = probs < sampling.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(drop, out)
    return scores


def vocabulary_part_sums(weights: Tensor) -> Tensor:
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
    columns = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)
    return columns.clamp_(max=weights.shape[-1] - 1)  # only where weights are not finite


def inverse_transform_sample_tokens(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """[b]: tokens by their `weights` [b, V], of which `sums` are the `vocabulary_part_sums`: first the part, then the
    token in it."""
    if sums.shape[-1] == 1:
        return _passed(weights, uniform)[:, 0]
    part = _passed(sums, uniform)
    own = sums.gather(1, part)[:, 0]
    edge = sums.cumsum(-1)
    within = (uniform * edge[:, -1] - (edge.gather(1, part)[:, 0] - own)) / own
    columns = part * PART + torch.arange(PART, device=weights.device)  # [b, PART]
    inside = weights.gather(1, columns.clamp(max=weights.shape[-1] - 1)).masked_fill(columns >= weights.shape[-1], 0)
    return columns.gather(1, _passed(inside, within.clamp(0, LARGEST)))[:, 0].clamp_(max=weights.shape[-1] - 1)


def choose_tokens(
    logits: Tensor, sampling: SamplingParams, uniform: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(tokens [b], their log-probabilities [b]) from logits [b, V]. `seen` [b, V]: tokens that are penalized."""
    logits = logits.float()
    scores = logits if sampling.scale == 1 else logits / sampling.scale
    penalized = scores
    if seen is not None:
        penalty = sampling.repetition_penalty
        penalized = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if sampling.forbidden_token_ids:
        forbidden = copy_to_device_async(torch.tensor(sampling.forbidden_token_ids), logits.device)
        penalized = penalized.index_fill(-1, forbidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    sums = vocabulary_part_sums(weights)
    total = sums.sum(-1)
    if uniform is None:
        tokens = penalized.argmax(-1)
    else:
        filtered = filter_logits(penalized, sampling)
        if filtered is not scores:
            weights = filtered.softmax(-1)
            sums = vocabulary_part_sums(weights)
        tokens = inverse_transform_sample_tokens(weights, sums, uniform)
    return tokens, ((scores.gather(1, tokens[:, None]) - top)[:, 0] - total.log()).float()
