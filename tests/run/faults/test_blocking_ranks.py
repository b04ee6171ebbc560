"""Which ranks the others wait for, from states written by hand."""

from __future__ import annotations

import pytest

from megaswift.run.faults.blocking_ranks import Cause, RankState, find_cause

TP01, TP23, DP02, DP13 = [0, 1], [2, 3], [0, 2], [1, 3]


def waits(members: list[int], group: str, number: int, **counts: int) -> RankState:
    return RankState(5, f"all_reduce of {group}", members, group, number, {group: number, **counts})


def cause(states: dict[int, RankState], ended: tuple[int, ...] = (), rank: int = 0) -> Cause:
    return find_cause(rank, states.get, ended.__contains__, [0, 1, 2, 3])


def test_a_rank_in_other_code() -> None:
    states = {0: waits(TP01, "tp01", 4), 1: RankState(5, code="loader.py:3 next")}
    assert list(cause(states).elsewhere) == [1] and list(cause(states).waiting) == [0]


def test_the_chain_is_followed() -> None:
    """0 waits for 2, which waits for 3, which does not answer; 1 has nothing to do with it."""
    states = {
        0: waits(DP02, "dp02", 2),
        1: waits(DP13, "dp13", 2),
        2: waits(TP23, "tp23", 9, dp02=1),
    }
    assert cause(states) == Cause([], [3], {}, {0: states[0], 2: states[2]})
    assert cause(states, rank=1).silent == [3]


def test_a_rank_that_has_joined_is_not_asked() -> None:
    states = {
        0: waits([0, 1, 2, 3], "all", 7),
        1: waits([0, 1, 2, 3], "all", 7),
        2: RankState(5, "recv", [2, 3], counts={"all": 7}),
        3: RankState(5, counts={"all": 6}),
    }
    assert list(cause(states).elsewhere) == [3] and list(cause(states).waiting) == [0]


def test_ranks_that_wait_for_each_other() -> None:
    states = {0: waits(TP01, "tp01", 4, dp02=1), 1: waits(DP13, "dp13", 3, tp01=3), 3: waits(TP23, "tp23", 1, dp13=2)}
    states[2] = waits(DP02, "dp02", 2, tp23=0)
    found = cause(states)
    assert not (found.ended or found.silent or found.elsewhere) and sorted(found.waiting) == [0, 1, 2, 3]


def test_unknown_members_are_all_ranks() -> None:
    states = {0: RankState(2, "wait"), 1: RankState(2, "wait"), 2: RankState(2), 3: RankState(2, "wait")}
    assert list(cause(states).elsewhere) == [2]


@pytest.mark.parametrize("ended", [(1,), (1, 2)])
def test_ended_ranks(ended: tuple[int, ...]) -> None:
    states = {0: waits([0, 1, 2, 3], "all", 7), 3: waits([0, 1, 2, 3], "all", 7)}
    assert cause(states, ended).ended == list(ended)
