"""Rows for the samples of a step: every sample once, no row too long, as many rows on each rank, nearly equal."""

from __future__ import annotations

import random

import pytest

from megaswift.data.batches.step_packing import ROWS_PER_STAGE, StepPacking, pack_samples_of_step


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
