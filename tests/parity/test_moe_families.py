"""Families with experts of their own kind: gradients and three steps against Hugging Face under the layouts that cut
them."""

from __future__ import annotations

import pytest

from tests.parity.cases import parse
from tests.parity.check import check
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
FAMILIES = ("qwen2_moe", "gpt_oss", "olmoe", "minimax_m2", "qwen3_next", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3")
LAYOUTS = (
    "tp2 sp ep2",
    *(
        pytest.param(text, marks=pytest.mark.slow)
        for text in (
            "single",
            "tp2 sp pp2",
            "packed cp2",
            "dp2 ep2 do",
            "tp2 sp cp2 packed recompute=selective",
            "pp2 vpp2 recompute=moe",
        )
    ),
)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains(family: str, text: str, pool: Pool, references: References) -> None:
    """Shared experts and their gates, windows that take turns, dense layers between; sinks, biases, stacked experts;
    gated delta nets; biases beside softmax."""
    check(parse(text, model=family), pool, references)
