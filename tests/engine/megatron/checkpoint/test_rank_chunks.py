"""Flat ranges of a tensor as boxes."""

from __future__ import annotations

import math

import pytest
import torch

from megaswift.engine.megatron.checkpoint.rank_chunks import element_range_boxes

SHAPES = [(7,), (4, 5), (3, 1), (1, 6), (2, 3, 4), (1, 4, 3), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flat_range_is_its_boxes(shape: tuple[int, ...]) -> None:
    """Each element once, in order, whatever the range."""
    size = math.prod(shape)
    tensor = torch.arange(size).view(shape)
    for first in range(size):
        for last in range(first + 1, size + 1):
            flat, hits = torch.arange(first, last), torch.zeros(shape, dtype=torch.int)
            boxes = list(element_range_boxes(shape, first, last))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            for corner, extent, at in boxes:
                region = tuple(slice(c, c + n) for c, n in zip(corner, extent, strict=True))
                hits[region] += 1
                assert torch.equal(tensor[region].reshape(-1), flat[at : at + math.prod(extent)])
            want = torch.zeros(size, dtype=torch.int)
            want[first:last] = 1
            assert torch.equal(hits.view(-1), want)
