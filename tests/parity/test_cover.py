"""The cover is a cover, the list of layouts is the product's legal part, and the package's own checks agree with the
rule by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from megaswift.families import FAMILIES, family_of
from megaswift.parallel.constraints import LayoutRequest, broken_rule_problems
from megaswift.parallel.model_shape import ModelShape
from tests.parity import cover, test_deepseek_families, test_dense_families, test_families, test_moe_families
from tests.parity.cases import Case, parse
from tests.parity.models import config, is_moe

pytestmark = pytest.mark.wide

MODELS = tuple(cover.SWITCHES)


@pytest.mark.wide
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_occurs(model: str) -> None:
    """Any two choices that some legal case combines are combined in a case of the default run, those of the dense model
    with or without experts."""
    keys = (*cover.AXES, *cover.SWITCHES[model])

    def pairs(cases: object) -> set[object]:
        return {(a, getattr(c, a), b, getattr(c, b)) for c in cases for a, b in combinations(keys, 2)}  # type: ignore[attr-defined]

    elsewhere = pairs(cover.default("moe")) if model == "dense" else set()
    assert pairs(cover.default(model)) | elsewhere >= pairs(cover.paired(model))
    for axis in cover.AXES if model not in cover.HYBRID else ():
        assert {getattr(c, axis) for c in cover.default(model)} >= {getattr(c, axis) for c in cover.layouts(model)}, (
            axis
        )


def test_gated_delta_nets_meet_every_axis() -> None:
    """The default cases of the models with and without experts together."""
    cases = [c for model in cover.HYBRID for c in cover.default(model)]
    for axis in (*cover.AXES, "do", "packed"):
        assert len({getattr(c, axis) for c in cases}) > 1, axis
    assert {c.recompute for c in cases} == {"none", "full", "selective", "moe"}
    assert {c.tp for c in cases if not c.sp} == {1, 2, 4}


def test_the_default_run_has_every_family() -> None:
    """Each is trained on ranks, or scored and exported."""
    trained = (*test_dense_families.VARIANTS, *test_moe_families.FAMILIES)
    trained += tuple(parse(text).model for text in test_deepseek_families.DEFAULT)
    assert set(FAMILIES.names()) <= {*trained, *test_families.SCORED}


@pytest.mark.parametrize("model", MODELS)
def test_words_and_sizes(model: str) -> None:
    """A case reads back from its text; all fit on eight processes; none occurs twice."""
    cases = [*cover.default(model), *cover.every(model)]
    assert all(parse(str(c)) == c and c.world <= cover.RANKS for c in cases)
    per_layout = 1 if model in cover.HYBRID else 2
    assert len(set(cover.every(model))) == len(cover.every(model)) == per_layout * len(cover.layouts(model))
    assert len(set(cover.default(model))) == len(cover.default(model)) < 45


def test_interleaved_schedule_gets_whole_rounds() -> None:
    """Micro-batches: at least two in all, at least one a rank, and a multiple of the stages when chunks interleave."""
    for model in MODELS:
        for c in cover.every(model):
            assert c.total >= 2 and c.total % c.dp == 0
            assert c.vpp == 1 or c.total // c.dp % c.pp == 0


def every_product(model: str) -> Iterator[Case]:
    """Legal and not, on whole worlds up to 8 processes."""
    sizes = (1, 2, 4, 8)
    experts = (sizes, sizes) if is_moe(model) else ((1, 2), (1,))
    for tp, sp, pp, vpp, cp, dp, ep, etp in product(sizes, (False, True), (1, 2, 4), (1, 2), sizes, sizes, *experts):
        case = Case(model, tp=tp, sp=sp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp)
        if case.world <= cover.RANKS:
            yield case


@pytest.mark.parametrize("model", MODELS)
def test_the_checks_agree_with_the_rule_by_hand(model: str) -> None:
    """`parallel.constraints` refuses exactly the layouts that are not in the list of all."""
    hf_config = config(model).to_dict()
    shape = ModelShape.of(family_of(hf_config).spec(hf_config))
    for case in every_product(model):
        asked = LayoutRequest(
            case.world, case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp, sequence_parallel=case.sp, max_length=64
        )
        problems = list(broken_rule_problems(shape, asked))
        assert (not problems) == cover.legal(case), f"{case}: {[str(p) for p in problems]}"
