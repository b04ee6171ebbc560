"""How many workers for environments each rank starts.

Covers: megaswift/run/ray_roles.py.
"""

from __future__ import annotations

import pytest

from megaswift.run.ray_roles import workers_of_rank


@pytest.mark.parametrize(
    ("total", "sampling", "each"),
    [
        (5, [True, True], [3, 2]),
        (7, [True, False, True, False, True], [3, 2, 2]),
        (4, [False, True, True], [2, 2]),
        (1, [True, True, True], [1, 1, 1]),
    ],
)
def test_workers_are_shared_out_once(total: int, sampling: list[bool], each: list[int]) -> None:
    assert [workers_of_rank(total, sampling, rank) for rank, samples in enumerate(sampling) if samples] == each
