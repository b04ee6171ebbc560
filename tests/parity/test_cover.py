"""The cover is a cover, the list of layouts is the product's legal part, and the package's own checks agree with the rule by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.parity import cover
from tests.parity.cases import parse

KEYS = {"dense": (*cover.AXES, *cover.SWITCHES), "moe": (*cover.AXES, *cover.MOE_SWITCHES)}


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_every_pair_occurs(model: str) -> None:
    """Any two choices that some legal case combines are combined in a case of the default run."""
    def pairs(cases: object) -> set[object]:
        return {(a, getattr(c, a), b, getattr(c, b)) for c in cases for a, b in combinations(KEYS[model], 2)}  # type: ignore[attr-defined]

    assert pairs(cover.pairwise(model)) == pairs(cover.switched(model))


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_words_and_sizes(model: str) -> None:
    """A case reads back from its text; all fit on eight processes; none occurs twice."""
    cases = [*cover.default(model), *cover.every(model)]
    assert all(parse(str(c)) == c and c.world <= cover.RANKS for c in cases)
    assert len(set(cover.every(model))) == len(cover.every(model)) == 2 * len(cover.layouts(model))
    assert len(set(cover.default(model))) == len(cover.default(model)) < 45


def test_interleaved_schedule_gets_whole_rounds() -> None:
    """Micro-batches: at least two in all, at least one a rank, and a multiple of the stages when chunks interleave."""
    for model in ("dense", "moe"):
        for c in cover.every(model):
            assert c.total >= 2 and c.total % c.dp == 0
            assert c.vpp == 1 or c.total // c.dp % c.pp == 0
