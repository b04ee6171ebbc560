"""Rows for the samples of a step: every sample once, no row too long, as many rows on each rank, nearly equal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megaswift.data.batches.step_packing import (
    ROWS_PER_STAGE,
    StepPacking,
    pack_samples_of_step,
    split_samples_of_step,
)


@pytest.mark.parametrize("seed", range(60))
def test_rows(seed: int) -> None:
    draw = random.Random(seed)
    ranks, multiple, per_device = draw.choice((1, 2, 3, 8)), draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    pipeline = draw.choice((multiple, multiple * 2))
    accumulation, longest = multiple * draw.choice((1, 2, 8)), draw.choice((8, 100, 4096))
    samples = ranks * accumulation * per_device
    lengths = [max(1, min(longest, round(draw.lognormvariate(0, 1) * longest / 6))) for _ in range(samples)]
    packing = StepPacking(longest * per_device, pipeline, multiple)
    rows = pack_samples_of_step(lengths, packing, ranks, accumulation)
    assert sorted(sample for row in rows for sample in row) == list(range(samples))
    assert max(sum(lengths[i] for i in row) for row in rows) <= packing.capacity
    assert len(rows) % (ranks * multiple) == 0
    assert len(rows) <= ranks * accumulation
    if pipeline > 1:
        assert len(rows) >= ranks * min(accumulation, ROWS_PER_STAGE * pipeline)
    assert rows == pack_samples_of_step(lengths, packing, ranks, accumulation)


def test_as_few_rows_as_hold_them() -> None:
    """64 samples of 100 tokens in rows of 1,000 on two ranks: 6,400 tokens need four rows each."""
    rows = pack_samples_of_step([100] * 64, StepPacking(1000), 2, 32)
    assert [len(row) for row in rows] == [8] * 8


def test_long_samples_keep_their_rows() -> None:
    """Nothing fits beside a sample of full length."""
    assert pack_samples_of_step([10] * 4, StepPacking(10), 2, 2) == [[0], [1], [2], [3]]


def test_rows_are_nearly_equal() -> None:
    """By hand: the longest first, each to the row with the fewest tokens."""
    assert pack_samples_of_step([5, 4, 3, 3, 3], StepPacking(10), 2, 5) == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize("seed", range(60))
def test_limits(seed: int) -> None:
    """Every sample once, no micro-batch above the limit, as many on each rank, empty ones only without samples."""
    draw = random.Random(seed)
    ranks, multiple, uniform = draw.choice((1, 2, 3, 8)), draw.choice((1, 2, 4)), draw.choice((True, False))
    accumulation = multiple * draw.choice((1, 2, 8))
    longest = draw.choice((8, 100, 4096))
    samples = ranks * accumulation * draw.choice((1, 2, 4))
    lengths = [max(1, min(longest, round(draw.lognormvariate(0, 1) * longest / 6))) for _ in range(samples)]
    packing = StepPacking(longest * draw.choice((1, 2, 5)), multiple, multiple, limited=True, padded=True)
    padded = split_samples_of_step(lengths, packing, ranks, accumulation, uniform)
    packed = pack_samples_of_step(lengths, replace(packing, padded=False), ranks, accumulation)
    for micro in (padded, packed):
        assert sorted(sample for one in micro for sample in one) == list(range(samples))
        assert len(micro) % (ranks * multiple) == 0
        assert all(micro) or len(micro) > samples
    assert max(len(one) * max(lengths[i] for i in one) for one in padded if one) <= packing.capacity
    assert max(sum(lengths[i] for i in one) for one in packed) <= packing.capacity
    if uniform:
        most = max(map(len, padded))
        assert most * max(lengths) <= packing.capacity


def test_longest_first_by_hand() -> None:
    """Limit 12: 10 alone; 6 and 5; 4, 3 and 2. Two ranks need an even number: the largest of several is halved."""
    packing = StepPacking(12, limited=True, padded=True)
    lengths = [3, 10, 5, 2, 6, 4]
    assert split_samples_of_step(lengths, packing, 1, 6, False) == [[4, 2], [5, 0, 3], [1]]
    assert split_samples_of_step(lengths, packing, 2, 3, False) == [[5, 0, 3], [1], [4], [2]]
    assert split_samples_of_step([7, 9], packing, 4, 1, False) == [[1], [0], [], []]


def test_rows_of_a_pipeline_by_hand() -> None:
    """Limit 12, longest 5: two rows a micro-batch. At least four micro-batches a stage, where there are."""
    packing = StepPacking(12, 2, limited=True, padded=True)
    assert split_samples_of_step([3, 5, 2, 4, 1, 1], packing, 1, 3, True) == [[1, 3], [0, 2], [4, 5]]
    assert [len(one) for one in split_samples_of_step([5] * 20, packing, 1, 20, True)] == [2] * 10
    assert [len(one) for one in split_samples_of_step([1] * 20, packing, 1, 20, True)] == [3, 3, 3, 3, 2, 2, 2, 2]
