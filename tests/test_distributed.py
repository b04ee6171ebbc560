"""Agreement between real ranks over gloo: reductions, object collectives, and errors of one rank raised on all."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from megaswift import distributed
from megaswift.errors import CheckpointError, DataError, Problem, StorageError
from tests.parity.pool import Pool


def agreed(rank: int, world: int, _: None) -> list[object]:
    """The results of a rank (runs on the ranks)."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([member]) for member in range(world)][rank]
    results = [
        distributed.all_sum([rank + 1, 2**52]),
        distributed.all_max([rank, -rank]),
        distributed.all_gather_objects(f"r{rank}"),
        distributed.run_on_rank0(lambda: rank * 10 + 7),
        distributed.global_world_size(),
        distributed.map_over_ranks("abc", lambda some: [f"{rank}{x}" for x in some]),
        distributed.all_gather_merged_dict({"both": rank, rank: "own"}),
        distributed.broadcast_object(rank, src=1),
        distributed.broadcast_object(rank, group=alone) == rank,
        errors_of(rank),
    ]
    for error in (
        DataError([Problem("a", "is bad"), Problem("b", "too")]),
        OSError(28, "No space left on device", "/disk/x"),
    ):
        try:
            distributed.run_on_rank0(lambda error=error: (_ for _ in ()).throw(error))
        except (DataError, StorageError) as caught:
            results.append([type(caught).__name__, [p.what + " " + p.rule for p in caught.problems]])
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4), dist.group.WORLD)
    results.append(distributed.run_on_rank0(lambda: time.sleep(5) or 5, hours=0.1))  # longer than a collective may take
    dist.destroy_process_group()
    return results


def errors_of(rank: int) -> list[list[str]]:
    """The problems that each call raises on this rank: of both, of the other one alone, beyond a limit, of none."""
    same = [Problem("x", "is bad"), Problem(f"r{rank}", "too")]
    raised = []
    for problems, limit in ((same, None), (same if rank else [], None), (same, 2), ([], None)):
        try:
            distributed.raise_on_all_ranks(problems, DataError, limit)
            raised.append([])
        except DataError as error:
            raised.append([f"{p.what} {p.rule}" for p in error.problems])
    try:
        distributed.run_and_gather_on_all_ranks(lambda: full_disk() if rank else "done")
    except StorageError as error:
        raised.append([type(error).__name__, *[p.what for p in error.problems]])
    return raised


def full_disk() -> str:
    """Fails as a full disk does."""
    raise OSError(28, "No space left on device", "/disk/y")


@pytest.mark.process
def test_two_ranks_agree(pool: Pool) -> None:
    expected = [
        [3.0, 2.0**53],
        [1.0, 0.0],
        ["r0", "r1"],
        7,
        2,
        ["0a", "1b", "1c"],
        {"both": 1, 0: "own", 1: "own"},
        1,
        True,
        [
            ["x is bad", "r0 too", "r1 too"],
            ["x is bad", "r1 too"],
            ["x is bad", "r0 too", "1 more of the same kind"],
            [],
            ["StorageError", "/disk/y"],
        ],
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
    assert distributed.all_gather_merged_dict({"a": 1}) == {"a": 1} and distributed.broadcast_object("x") == "x"
    distributed.raise_on_all_ranks([])
    with pytest.raises(CheckpointError, match="x"):
        distributed.raise_on_all_ranks([Problem("x", "is bad")] * 2)
    assert distributed.map_over_ranks([1, 2], lambda some: [-x for x in some]) == [-1, -2]
    with pytest.raises(DataError, match="bad"):
        distributed.run_on_rank0(lambda: (_ for _ in ()).throw(DataError("bad")))
    with pytest.raises(StorageError, match="No space"):
        distributed.run_on_rank0(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device", "/x")))
    with pytest.raises(ZeroDivisionError):
        distributed.run_on_rank0(lambda: 1 // 0)
