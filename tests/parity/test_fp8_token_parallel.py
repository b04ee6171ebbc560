"""FP8 products on ranks that have different tokens: the engine against a Hugging Face model that quantizes, in plain
torch, the tokens of each context-parallel rank by themselves, and those that meet at an expert together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity import fp8_oracle
from tests.parity.cases import parse
from tests.parity.fp8_oracle import Products
from tests.parity.models import build
from tests.parity.pool import Pool, shared
from tests.parity.test_fp8 import LIMIT, Rows, distance, nearest, products
from tests.te.sources import RELEASES

FAR = 1e-2
CASES = [
    ("tensorwise", "llama cp2"),
    ("tensorwise", "llama cp2 packed"),
    ("tensorwise", "llama cp2 comm=a2a"),
    ("tensorwise", "llama cp2 tp2 sp"),
    ("tensorwise", "llama cp4"),
    ("tensorwise", "llama cp2 dp2 do"),
    ("blockwise", "llama cp2"),
    ("blockwise", "llama cp2 packed comm=a2a"),
    ("blockwise", "llama-fp8 cp2 tp2 sp"),
    ("tensorwise", "moe dp2 ep2"),
    ("tensorwise", "moe cp2 ep2"),
    ("tensorwise", "moe cp2 dp2 ep2 do"),
    ("tensorwise", "moe dp4 ep2 packed"),
    ("tensorwise", "moe-nf4 tp2 sp dp2 ep2 etp2"),
    ("blockwise", "moe dp2 ep2"),
    ("blockwise", "moe cp2 ep2"),
    ("blockwise", "moe dp4 ep2"),
]
QUICK = [("tensorwise", "llama cp2 packed"), ("tensorwise", "moe dp2 ep2")]


def compare(recipe: str, layout: str, pool: Pool, models: Path) -> None:
    """Loss and gradients of every parameter; a tensorwise scale of other tokens would be far away. (Scales of blocks
    are powers of 2: those of other tokens round almost no value otherwise.)"""
    case = replace(parse(layout), te=True)
    folder = build(case.model, models / case.model)
    shape = Rows(tokens=256 * case.cp if recipe == "blockwise" and case.sp else max(16, 8 * case.cp * case.tp))
    if recipe == "tensorwise":
        rows, chosen = shape.of(case, 0), products(case, recipe)
        other: Products = replace(chosen, cp=1, ep=1)
        own, far = (fp8_oracle.reference(folder, rows, p).gradients for p in (chosen, other))
        assert distance(own, far) > FAR
    assert nearest(case, recipe, pool, folder, shape) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize(
    ("recipe", "layout"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_loss_and_gradients(recipe: str, layout: str, te_pool: Pool, models: Path) -> None:
    """The oldest release."""
    compare(recipe, layout, te_pool, models)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("recipe", "layout"), [("blockwise", "llama cp2"), ("tensorwise", "moe dp2 ep2")])
def test_the_newest_release(recipe: str, layout: str, models: Path) -> None:
    """Other sources of Transformer Engine."""
    compare(recipe, layout, shared(RELEASES[-1]), models)
