"""Bytes by link, worked by hand: four ranks, two a node."""

from __future__ import annotations

import pytest

from megaswift.simulator.calls import Call, Group
from megaswift.simulator.traffic import bytes_by_link

ALL = Group("0", (0, 1, 2, 3))


def call(name: str, sent: int, received: int, peer: int | None = None, detail: tuple[object, ...] = ()) -> Call:
    """A call of all four with float32 vectors of so many elements."""
    forms = [(((size,), "float32"),) if size else () for size in (sent, received)]
    return Call(name, ALL, forms[0], forms[1], 4 * sent, 4 * received, peer, detail, "", "", 1)


@pytest.mark.parametrize(
    ("rank", "made", "inside", "between"),
    [
        (0, call("all_reduce", 8, 8), 48, 0),
        (1, call("all_reduce", 8, 8), 0, 48),
        (1, call("all_gather", 2, 8), 0, 24),
        (0, call("reduce_scatter", 8, 2), 24, 0),
        (3, call("reduce_scatter", 8, 2), 0, 24),
        (0, call("broadcast", 8, 8, peer=0), 32, 0),
        (3, call("broadcast", 0, 8, peer=0), 0, 0),
        (0, call("send", 8, 0, peer=2), 0, 32),
        (0, call("recv", 0, 8, peer=2), 0, 0),
        (0, call("all_to_all", 8, 8, detail=((2, 2, 2, 2), (2, 1, 3, 2))), 4, 20),
        (2, call("gather", 8, 0, peer=3), 32, 0),
        (2, call("barrier", 0, 0), 0, 0),
    ],
)
def test_bytes_by_link(rank: int, made: Call, inside: int, between: int) -> None:
    """A ring goes 0, 1, 2, 3: 0 and 2 send within their node. Each sends (n - 1) / n of the whole, twice in a sum."""
    found = bytes_by_link(made, rank, 2)
    assert (found["NVLink"], found["network"]) == (inside, between)
