"""Tensor-parallel FP8 products in one process: what each rank holds is quantized by itself, in plain torch.

A rank has rows of a column-parallel weight and columns of a row-parallel one. Quantized by shard are these, the
gradients of a column-parallel output and the inputs of a row-parallel product; the other input and the other gradient
are whole on every rank, or are gathered from sequence-parallel ranks whose scales are of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.te.fp8_reference import Recipe, linear


def _suffixes(recipe: Recipe, ranks: int, suffix: str) -> list[str]:
    """Delayed scaling has one scale for all ranks: their largest magnitudes are reduced."""
    return [suffix if recipe.name == "delayed" else f"{suffix}@{rank}" for rank in range(ranks)]


def column_parallel(x: Tensor, weight: Tensor, ranks: int, recipe: Recipe, suffix: str = "") -> Tensor:
    """[..., n] of x [..., k] and weight [n, k], whose rows are split among ranks."""
    shards = zip(weight.chunk(ranks, 0), _suffixes(recipe, ranks, suffix), strict=True)
    return torch.cat([linear(x, shard, recipe, name) for shard, name in shards], -1)


def row_parallel(x: Tensor, weight: Tensor, ranks: int, recipe: Recipe, suffix: str = "") -> Tensor:
    """[..., n] of x [..., k] and weight [n, k], whose columns are split among ranks, and x with them."""
    parts = zip(x.chunk(ranks, -1), weight.chunk(ranks, 1), _suffixes(recipe, ranks, suffix), strict=True)
    total, *others = [linear(part, shard, recipe, name) for part, shard, name in parts]
    for other in others:
        total = total + other
    return total
