"""Every model family on Transformer Engine's modules against Hugging Face: each axis of a layout, each exchange of
context parallelism, and adapters.

Covers: megaswift/engine/megatron/layers/layer_implementation.py,
megaswift/engine/megatron/lora/grouped_expert_adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megaswift.families import FAMILIES
from tests.parity.cases import Case, parse
from tests.parity.check import check
from tests.parity.models import is_moe
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.parity.test_lora import Adapters, adapters
from tests.parity.test_lora import check as check_adapters

assert adapters is not None
pytestmark = pytest.mark.process
VARIANTS = ("mistral-window", "qwen2-window", "llama3-rope", "qwen3-yarn", "llama-bias")
"""Models that ask another thing of the modules than their family's first."""
LAYOUTS = ("single", "packed", "tp2 sp", "tp2 sp packed", "pp2", "cp2")
EXPERT_LAYOUTS = ("dp2 ep2",)
KINDS = ("pp2 vpp2", "cp2 comm=a2a", "cp2 packed comm=a2a", "cp2 comm=all_gather", "cp4 comm=a2a+p2p")
EXPERT_KINDS = ("tp2 sp etp2", "dp2 etp2 packed")
BESIDE = ("", "do recompute=full", "do", "recompute=selective", "filler")
"""What goes beside one of KINDS, in turn: over the families each meets each."""
ADAPTED = ("tp2 sp", "pp2 vpp2 packed", "cp2 comm=a2a", "dp2 do overlap")
EXPERT_ADAPTED = ("dp2 ep2 do",)
QUICK = {
    "gemma2": ("single",),
    "gpt_oss": ("packed", "cp2 comm=a2a"),
    "deepseek_v3": ("dp2 ep2", "pp2 vpp2"),
    "olmo3": ("tp2 sp packed",),
    "glm4": ("tp2 sp",),
    "qwen2_moe": ("pp2", "tp2 sp etp2"),
    "minimax_m2": ("cp2",),
    "mistral-window": ("cp2 packed comm=a2a",),
}
"""Of the default run: families that differ most."""
QUICK_ADAPTED = {"minimax_m2": ("dp2 ep2 do",)}


def models() -> tuple[str, ...]:
    """Every family by its first model, then the variants."""
    return (*FAMILIES.names(), *VARIANTS)


def parameters(name: str, texts: tuple[str, ...], quick: dict[str, tuple[str, ...]], turn: int = -1) -> Iterator[Any]:
    """A model's cases; from `turn` on each has one of BESIDE."""
    for place, text in enumerate(texts):
        more = BESIDE[(turn + place) % len(BESIDE)] if turn >= 0 else ""
        case: Case = replace(parse(f"{text} {more}", model=name), te=True)
        marks = () if text in quick.get(name, ()) else (pytest.mark.slow,)
        yield pytest.param(case, marks=marks, id=str(case))


def family_cases() -> Iterator[Any]:
    """Every model under every layout and kind."""
    for turn, name in enumerate(models()):
        yield from parameters(name, (*LAYOUTS, *(EXPERT_LAYOUTS if is_moe(name) else ())), QUICK)
        yield from parameters(name, (*KINDS, *(EXPERT_KINDS if is_moe(name) else ())), QUICK, turn)


def adapter_cases() -> Iterator[Any]:
    """Every family under every layout of ADAPTED."""
    for name in FAMILIES.names():
        yield from parameters(name, (*ADAPTED, *(EXPERT_ADAPTED if is_moe(name) else ())), QUICK_ADAPTED)


@pytest.mark.parametrize("case", family_cases())
def test_family(case: Case, te_pool: Pool, references: References) -> None:
    """What each family asks of norms, experts, windows, sinks, soft caps and rotary embeddings."""
    check(case, te_pool, references)


@pytest.mark.parametrize("case", adapter_cases())
def test_adapters(case: Case, te_pool: Pool, adapters: Adapters) -> None:  # noqa: F811
    """Adapters on every projection that a family has."""
    check_adapters(*adapters.of(case), te_pool)
