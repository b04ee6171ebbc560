"""Every parallel layout on Transformer Engine's modules against Hugging Face: its own Python, over torch functions in
place of its kernels (tests/te)."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.parity import cover_te
from tests.parity.cases import Case, parse
from tests.parity.check import check
from tests.parity.pool import Pool, shared
from tests.parity.references import References
from tests.te.sources import RELEASES

DEFAULT = [*cover_te.default("dense"), *cover_te.default("moe")]
REST = [c for model in ("dense", "moe") for c in cover_te.every(model) if c not in DEFAULT]


@pytest.mark.process
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_layout(case: Case, te_pool: Pool, references: References) -> None:
    """The cover of pairs."""
    check(case, te_pool, references)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("case", REST, ids=str)
def test_every_layout(case: Case, te_pool: Pool, references: References) -> None:
    """All other legal layouts up to 8 processes."""
    check(case, te_pool, references)


@pytest.mark.process
@pytest.mark.parametrize("text", ["dense te tp2 sp packed", "moe te cp2 comm=p2p packed", "moe te dp2 ep2 do"])
def test_the_newest_release(text: str, references: References) -> None:
    """Other sources of Transformer Engine under the same stand-ins."""
    check(parse(text), shared(RELEASES[-1]), references)


@pytest.mark.wide
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_every_pair_occurs(model: str) -> None:
    """Any two choices that some case of four ranks combines are combined in a case of the default run."""

    def pairs(cases: object) -> set[object]:
        return {(a, getattr(c, a), b, getattr(c, b)) for c in cases for a, b in combinations(cover_te.KEYS, 2)}  # type: ignore[attr-defined]

    assert pairs(cover_te.default(model)) >= pairs(cover_te.candidates(model))
    assert all(parse(str(c)) == c for c in cover_te.every(model))
    assert len(cover_te.default(model)) < 35
