"""Agreement between real ranks over gloo: sums, maxima, and a mistake that only rank 0 sees."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from megaswift import distributed
from megaswift.errors import DataError, Problem, StorageError
from tests.parity.pool import Pool


def agreed(rank: int, world: int, _: None) -> list[object]:
    """What a rank finds (on the ranks)."""
    dist.init_process_group("gloo")
    found = [
        distributed.all_sum([rank + 1, 2**52]),
        distributed.all_max([rank, -rank]),
        distributed.all_gather_objects(f"r{rank}"),
        distributed.run_on_rank0(lambda: rank * 10 + 7),
        distributed.global_world_size(),
        distributed.split_work("abc", lambda some: [f"{rank}{x}" for x in some]),
    ]
    for error in (
        DataError([Problem("a", "is bad"), Problem("b", "too")]),
        OSError(28, "No space left on device", "/disk/x"),
    ):
        try:
            distributed.run_on_rank0(lambda error=error: (_ for _ in ()).throw(error))
        except (DataError, StorageError) as caught:
            found.append([type(caught).__name__, [p.what + " " + p.rule for p in caught.problems]])
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
    found.append(distributed.run_on_rank0(lambda: time.sleep(2.5) or 5, hours=0.1))  # longer than a collective may take
    dist.destroy_process_group()
    return found


@pytest.mark.process
def test_two_ranks_agree(pool: Pool) -> None:
    expected = [
        [3.0, 2.0**53],
        [1.0, 0.0],
        ["r0", "r1"],
        7,
        2,
        ["0a", "1b", "1c"],
        ["DataError", ["a is bad", "b too"]],
        ["StorageError", ["/disk/x No space left on device"]],
        5,
    ]
    assert pool.run("tests.test_distributed:agreed", None, 2) == [expected, expected]


def test_alone_everything_is_as_it_is() -> None:
    assert (
        distributed.all_sum([2.5]) == [2.5]
        and distributed.all_max([1, 2]) == [1.0, 2.0]
        and distributed.all_gather_objects("x") == ["x"]
        and distributed.global_rank() == 0
    )
    assert distributed.split_work([1, 2], lambda some: [-x for x in some]) == [-1, -2]
    with pytest.raises(DataError, match="bad"):
        distributed.run_on_rank0(lambda: (_ for _ in ()).throw(DataError("bad")))
    with pytest.raises(StorageError, match="No space"):
        distributed.run_on_rank0(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device", "/x")))
    with pytest.raises(ZeroDivisionError):
        distributed.run_on_rank0(lambda: 1 // 0)
