"""Which completions a rank writes: of those that have samplers, each its part, in the order of the ranks.

Covers: megaswift/trainers/rl/generation.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift import distributed
from megaswift.parallel.layout import Layout
from megaswift.rollout.sampler import SamplingParams
from megaswift.trainers.rl.generation import Generation, samples_here

LAYOUT = Layout(8, tp=2, pp=2)


@pytest.mark.parametrize(("everywhere", "samplers"), [(False, 2), (True, 8)])
def test_shares_are_whole_groups_and_nothing_is_written_twice(
    everywhere: bool, samplers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every rank has an engine. One rank a replica speaks for it, whoever samples."""
    engine: Any = SimpleNamespace(layout=LAYOUT)
    found, speaking = [], 0
    for rank in range(8):
        monkeypatch.setattr(distributed, "global_rank", lambda rank=rank: rank)
        at = LAYOUT.coordinates(rank)
        sampler: Any = object() if everywhere or samples_here(at) else None
        made = Generation(engine, at, sampler, SamplingParams(1), 0, everywhere=everywhere)
        found.append(made.own(20, 2))
        speaking += made.first
    assert [i for share in found for i in share] == list(range(20)) and speaking == 2
    assert sum(bool(share) for share in found) == samplers and all(len(share) % 2 == 0 for share in found)
