"""Planted faults: how many are found, and how many named at their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bisection.count_faults import RANDOM, SEED, Planted
from tests.bisection.faults import DELTA_NETS, REPORTED, Fault, placed_at_random
from tests.bisection.lora_faults import LORA_FAULTS
from tests.parity.pool import Pool

FOUND, RIGHT = 0.95, 0.90


def test_the_faults_are_many_and_different() -> None:
    drawn = placed_at_random(RANDOM, SEED)
    assert len(REPORTED) + len(drawn) >= 60 and len(set(drawn)) == len(drawn)
    assert placed_at_random(RANDOM, SEED) == drawn != placed_at_random(RANDOM, SEED + 1)


@pytest.mark.slow
@pytest.mark.process
def test_faults_are_found_at_their_place(tmp_path: Path, pool: Pool) -> None:
    """`python -m tests.bisection.count_faults` prints each."""
    faults: list[Fault] = [*REPORTED, *DELTA_NETS, *LORA_FAULTS, *placed_at_random(RANDOM, SEED)]
    answers = list(Planted(pool, tmp_path).answers(faults))
    missed = [str(a.fault) for a in answers if not a.found]
    misplaced = [f"{a.fault}: {a.name}" for a in answers if not a.right]
    assert len(missed) <= (1 - FOUND) * len(answers), missed
    assert len(misplaced) <= (1 - RIGHT) * len(answers), misplaced
