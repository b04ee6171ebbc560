"""The pool reports what its ranks did wrong, ends those that hang, and goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parity.pool import STACK_SECONDS, Pool, RankError

pytestmark = pytest.mark.process


def add(rank: int, world: int, payload: Any) -> torch.Tensor:
    """All ranks' numbers summed over gloo."""
    torch.distributed.init_process_group("gloo")
    total = torch.tensor(float(rank + payload))
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total


def fail_or_wait(rank: int, world: int, payload: Any) -> None:
    """Rank 1 raises, or sleeps too long."""
    if rank == 1 and payload == "raise":
        raise ValueError("rank one is unwell")
    if rank == 1:
        time.sleep(600)


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    """A pool that has imported torch and this module."""
    with Pool(("torch", "torch.distributed", __name__)) as started:
        yield started


def test_results_come_in_order_of_rank(small: Pool) -> None:
    """Worlds of several sizes in one pool."""
    for n in (1, 3, 2):
        want = float(sum(range(n)) + 10 * n)
        assert [float(t) for t in small.run(f"{__name__}:add", 10, n)] == [want] * n


def test_errors_and_hangs_are_reported(small: Pool) -> None:
    """With the traceback of the rank, and the place where it hung; the next job runs."""
    with pytest.raises(RankError, match="rank one is unwell"):
        small.run(f"{__name__}:fail_or_wait", "raise", 2)
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1.*ended after 1 s.*in fail_or_wait"):
        small.run(f"{__name__}:fail_or_wait", "hang", 2, timeout=1.0)
    assert time.monotonic() - start < 1 + STACK_SECONDS, "the stack is there at once"
    assert [float(t) for t in small.run(f"{__name__}:add", 0, 2)] == [1.0, 1.0]
