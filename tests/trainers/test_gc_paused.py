"""The collector during start-up: seldom, then as before, and what start-up made is left out."""

from __future__ import annotations

import gc

import pytest

from megaswift.run.training import ALLOCATIONS, gc_paused


def test_the_collector_rests_and_comes_back() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), gc_paused():
        assert gc.get_threshold() == (ALLOCATIONS, *before[1:]) and gc.isenabled()
        kept = [[] for _ in range(1000)]
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() >= frozen + len(kept)
