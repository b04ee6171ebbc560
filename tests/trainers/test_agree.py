"""Agreement between real ranks over gloo: sums, maxima, and a mistake that only rank 0 sees."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from megaswift.errors import DataError, Problem, StorageError
from megaswift.trainers import agree
from tests.parity.pool import Pool


def agreed(rank: int, world: int, _: None) -> list[object]:
    """What a rank finds (on the ranks)."""
    dist.init_process_group("gloo")
    found = [
        agree.total([rank + 1, 2**52]),
        agree.largest([rank, -rank]),
        agree.gather(f"r{rank}"),
        agree.on_main(lambda: rank * 10 + 7),
        agree.world_size(),
        agree.spread("abc", lambda some: [f"{rank}{x}" for x in some]),
    ]
    for error in (
        DataError([Problem("a", "is bad"), Problem("b", "too")]),
        OSError(28, "No space left on device", "/disk/x"),
    ):
        try:
            agree.on_main(lambda error=error: (_ for _ in ()).throw(error))
        except (DataError, StorageError) as caught:
            found.append([type(caught).__name__, [p.what + " " + p.rule for p in caught.problems]])
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
    found.append(agree.on_main(lambda: time.sleep(2.5) or 5, hours=0.1))  # longer than a collective may take
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
    assert pool.run("tests.trainers.test_agree:agreed", None, 2) == [expected, expected]


def test_alone_everything_is_as_it_is() -> None:
    assert (
        agree.total([2.5]) == [2.5]
        and agree.largest([1, 2]) == [1.0, 2.0]
        and agree.gather("x") == ["x"]
        and agree.rank() == 0
    )
    assert agree.spread([1, 2], lambda some: [-x for x in some]) == [-1, -2]
    with pytest.raises(DataError, match="bad"):
        agree.on_main(lambda: (_ for _ in ()).throw(DataError("bad")))
    with pytest.raises(StorageError, match="No space"):
        agree.on_main(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device", "/x")))
    with pytest.raises(ZeroDivisionError):
        agree.on_main(lambda: 1 // 0)
