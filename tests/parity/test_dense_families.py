"""Dense families beyond Llama's kind: soft caps, windows, norms of other places and widths, two rotary bases, scales,
fused tensors.

Gradients and three steps against Hugging Face; scores and the way of the weights are in test_families.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import parse
from tests.parity.check import check
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.parity.test_families import variant_cases

pytestmark = pytest.mark.process
LATER = ("single", "tp4", "tp2 pp2 vpp2 recompute=full", "cp2 recompute=selective packed", "dp2 do")
PACKED = ("gemma3_text", "glm4", "phi3-longrope", "hunyuan_v1_dense", "ministral3")
STAGED = ("gemma3_text", "granite", "smollm3", "olmo3", "exaone4")
VARIANTS = (
    "phi3",
    "phi3-longrope",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "glm4",
    "granite",
    "smollm3",
    "seed_oss",
    "olmo3",
    "exaone4",
    "arcee",
    "arcee-bias",
    "ernie4_5",
    "ernie4_5-bias",
    "gemma",
    "glm",
    "hunyuan_v1_dense",
    "ministral3",
)


@pytest.mark.parametrize(("variant", "text"), variant_cases(VARIANTS, PACKED, STAGED, LATER))
def test_variant_trains(variant: str, text: str, pool: Pool, references: References) -> None:
    """Every feature of the family at once."""
    check(parse(text, model=variant), pool, references)
