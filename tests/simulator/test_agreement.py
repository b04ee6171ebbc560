"""Ranks that do not fit together are found and named with both lines of code; ranks that fit are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.simulator.agreement import Disagreement, compared_calls, disagreements
from megaswift.simulator.calls import Call, Group, Trace
from tests.memory.counted_ranks import CONFIG
from tests.simulator.recorded import RecordedSteps

PAIR = Group("1", (0, 1))
OTHER = Group("2", (0, 1))


def call(
    name: str,
    group: Group = PAIR,
    size: int = 4,
    line: int = 1,
    peer: int | None = None,
    detail: tuple[object, ...] = (),
) -> Call:
    """A call with one vector that is sent, received, or both."""
    form = (((size,), "float32"),)
    sent = () if name == "recv" else form
    received = () if name == "send" else form
    return Call(name, group, sent, received, 4 * size, 4 * size, peer, detail, f"code.py:{line}", "step", 1)


def found(*ranks: list[Call]) -> list[Disagreement]:
    """Of ranks 0, 1, ..., which call these."""
    return disagreements({rank: Trace(rank, calls) for rank, calls in enumerate(ranks)})


def test_ranks_that_fit() -> None:
    """Collectives in one order; messages in both directions, posted in any order."""
    both = [call("all_reduce"), call("all_gather", OTHER)]
    assert found(both, both) == []
    assert found([call("send", peer=1), call("recv", peer=1)], [call("send", peer=0), call("recv", peer=0)]) == []
    rows = ((1, 3), (1, 3)), ((3, 2), (3, 2))
    exchange = [call("all_to_all", detail=r) for r in rows]
    assert found([exchange[0]], [exchange[1]]) == []


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("missing", ([call("all_reduce")], [])),
        ("call", ([call("all_reduce")], [call("all_gather")])),
        ("call", ([call("broadcast", peer=0)], [call("broadcast", peer=1)])),
        ("shape", ([call("all_reduce")], [call("all_reduce", size=5)])),
        ("shape", ([call("all_reduce", detail=("SUM",))], [call("all_reduce", detail=("MAX",))])),
        ("shape", ([call("all_to_all", detail=((1, 3), (1, 3)))], [call("all_to_all", detail=((2, 2), (2, 2)))])),
        ("line", ([call("all_reduce", line=1)], [call("all_reduce", line=2)])),
        ("missing", ([call("send", peer=1)], [])),
        ("missing", ([], [call("recv", peer=0)])),
        ("shape", ([call("send", peer=1)], [call("recv", peer=0, size=5)])),
        ("order", ([call("barrier"), call("barrier", OTHER)], [call("barrier", OTHER), call("barrier")])),
    ],
)
def test_a_disagreement_is_named(kind: str, ranks: tuple[list[Call], list[Call]]) -> None:
    """Once, with both ranks and both lines."""
    [one] = found(*ranks)
    assert one.kind == kind and set(one.ranks) == {0, 1}
    lines = str(one).splitlines()
    assert lines[1].startswith(f"  rank {one.ranks[0]}: ") and lines[2].startswith(f"  rank {one.ranks[1]}: ")
    assert sum("code.py:" in line for line in lines) == sum(c is not None for c in one.calls)


def test_calls_without_another_rank_are_counted() -> None:
    """A group of which one rank is simulated, and messages to ranks that are not."""
    alone = Group("3", (0, 7))
    assert compared_calls({0: Trace(0, [call("barrier"), call("barrier", alone)]), 1: Trace(1, [call("barrier")])}) == (
        2,
        1,
    )
    assert compared_calls({0: Trace(0, [call("send", alone, peer=7)])}) == (0, 1)


PLANTED = {
    "skip": ("call", "megaswift/engine/vocabulary_shard.py:", "megatron/core/tensor_parallel/mappings.py:"),
    "shape": ("shape", "tests/simulator/planted.py:", "tests/simulator/planted.py:"),
    "order": ("order", "tests/simulator/planted.py:", "tests/simulator/planted.py:"),
    "exchanged": ("line", "tests/simulator/planted.py:", "tests/simulator/planted.py:"),
}


@pytest.mark.process
@pytest.mark.parametrize(
    "plant", ["order", *(pytest.param(p, marks=pytest.mark.slow) for p in PLANTED if p != "order")]
)
def test_a_planted_fault_is_found(plant: str, tmp_path: Path) -> None:
    """In the engine on two tensor-parallel ranks."""
    job = RecordedSteps(CONFIG, "--tp 2", 2, tmp_path, plant=plant)
    kind, *files = PLANTED[plant]
    wrong = disagreements(job.simulated())
    own = next(one for one in wrong if 1 in one.ranks)
    assert own.kind == kind, str(own)
    lines = [one.where if one else "" for one in own.calls]
    assert all(line.startswith(file) for line, file in zip(lines, files, strict=True)), str(own)
    assert (lines[0] == lines[1]) == (plant == "shape") and all(line in str(own) for line in lines)
