"""DeepSeek's line of families under parallel layouts: latent attention, groups of experts, biases that no gradient
trains.

Covers: megaswift/engine/megatron/layers/attention/latent.py.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import Case, parse
from tests.parity.check import check
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
DEFAULT = (
    "deepseek_v3 tp2 sp ep2",
    "deepseek_v3-plain tp2 sp cp2 packed",
    "deepseek_v3-dense tp2",
    "deepseek tp2 sp ep2",
    "deepseek_v2 tp2 sp pp2",
    "glm4_moe tp2 sp pp2",
    "glm4_moe_lite tp2 sp pp2",
    "dots1 tp2 sp ep2",
    "solar_open packed cp2",
    "exaone_moe tp2 sp pp2",
    "kimi_k2 single",
    "mistral4 tp2 sp ep2",
)
VARIANTS = (
    "deepseek_v3",
    "deepseek_v3-plain",
    "deepseek_v3-dense",
    "deepseek",
    "deepseek_v2",
    "deepseek_v2-greedy",
    "glm4_moe",
    "glm4_moe-plain",
    "glm4_moe_lite",
    "dots1",
    "solar_open",
    "exaone_moe",
    "kimi_k2",
    "mistral4",
    "mistral4-plain",
)
LAYOUTS = (
    "single",
    "tp2 sp pp2",
    "packed cp2",
    "dp2 ep2",
    "tp2 sp ep2",
    "tp2 pp2 sp vpp2",
    "pp2 packed recompute=full",
    "cp2 recompute=selective",
)


def rest() -> list[Case]:
    """What the default run leaves out."""
    texts = [f"{v} {layout}" for v in VARIANTS for layout in LAYOUTS if not (v.endswith("-dense") and "ep2" in layout)]
    return [parse(text) for text in texts if text not in DEFAULT]


@pytest.mark.parametrize("text", DEFAULT)
def test_trains(text: str, pool: Pool, references: References) -> None:
    """Gradients and three steps."""
    check(parse(text), pool, references)


@pytest.mark.slow
@pytest.mark.parametrize("case", rest(), ids=str)
def test_trains_elsewhere(case: Case, pool: Pool, references: References) -> None:
    """The same under more layouts."""
    check(case, pool, references)
