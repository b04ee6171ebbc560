"""Packing against a plain best-fit-decreasing of a few lines and hand-made cases; speed and fill on long tails."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megaswift.data.batches.packing import Packing, pack_best_fit, padded_lengths


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing as the books have it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r in range(len(rows)) if room[r] >= lengths[i]]
        if not fitting:
            rows.append([])
            room.append(capacity)
            fitting = [len(rows) - 1]
        best = min(fitting, key=lambda r: room[r])
        rows[best].append(i)
        room[best] -= lengths[i]
    return rows


def rows_of(packing: Packing) -> list[list[int]]:
    return [packing.row(i).tolist() for i in range(len(packing))]


def test_by_hand() -> None:
    # 7 | 6 4 | 5 3 2: best fit puts 4 beside 6 and 3, 2 beside 5
    assert rows_of(pack_best_fit(np.array([3, 7, 4, 5, 6, 2]), 10)) == [[0, 1], [2, 4], [3, 5]]
    assert rows_of(pack_best_fit(np.array([4, 4, 4, 4, 4]), 8)) == [[0, 1], [2, 3], [4]]
    assert rows_of(pack_best_fit(np.array([8, 1, 8]), 8)) == [[0], [1], [2]]


@pytest.mark.parametrize("seed", range(20))
def test_as_good_as_the_plain_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(8, 64))
    lengths = rng.integers(1, capacity + 1, size=int(rng.integers(1, 120)))
    packed, plain = pack_best_fit(lengths, capacity), plain_best_fit(lengths.tolist(), capacity)
    assert sorted(i for r in rows_of(packed) for i in r) == list(range(len(lengths)))
    assert all(lengths[r].sum() <= capacity and r == sorted(r) for r in rows_of(packed))
    assert len(packed) == len(plain)
    assert sorted(int(lengths[r].sum()) for r in rows_of(packed)) == sorted(int(lengths[r].sum()) for r in plain)
    firsts = [r[0] for r in rows_of(packed)]
    assert firsts == sorted(firsts)


def test_a_long_tail_is_filled_to_99_percent_in_a_second() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(int) + 4, 1, 4096)
    began = time.process_time()
    packed = pack_best_fit(lengths, 4096)
    assert time.process_time() - began < 1
    assert lengths.sum() / (len(packed) * 4096) > 0.99


def test_lengths_rounded_up() -> None:
    assert padded_lengths(np.array([1, 4, 5]), 4).tolist() == [4, 4, 8]
