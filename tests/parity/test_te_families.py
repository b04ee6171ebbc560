"""Every model family on Transformer Engine's modules against Hugging Face: each axis of a layout, each exchange of
context parallelism, and adapters.

Covers: megaswift/engine/megatron/layers/implementation.py,
megaswift/engine/megatron/lora/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megaswift.families import FAMILIES
from tests.parity.cases import Case, parse
from tests.parity.check import TRAIN, assert_within_limits, check
from tests.parity.compare import compare
from tests.parity.models import is_moe
from tests.parity.pool import Pool, RankError
from tests.parity.references import References
from tests.parity.test_lora import Adapters, adapters

assert adapters is not None
pytestmark = pytest.mark.process
VARIANTS = ("mistral-window", "qwen2-window", "llama3-rope", "qwen3-yarn", "llama-bias")
"""Models that ask another thing of the modules than their family's first."""
LAYOUTS = ("single", "packed", "tp2 sp", "tp2 sp packed", "pp2", "cp2")
EXPERT_LAYOUTS = ("dp2 ep2",)
KINDS = ("pp2 vpp2", "cp2 comm=a2a", "cp2 packed comm=a2a", "cp2 comm=all_gather", "cp4 comm=a2a+p2p")
EXPERT_KINDS = ("tp2 sp etp2", "dp2 etp2 packed")
BESIDE = ("", "do recompute=full", "do", "recompute=selective")
"""What goes beside one of KINDS, in turn: over the families each meets each."""
EXCHANGED_HEADS = ("cp2 comm=a2a", "cp2 packed comm=a2a", "cp4 comm=a2a+p2p")
WINDOWS = ("dots1", "exaone4", "exaone_moe", "phi3", "qwen2_moe", "smollm3", "mistral-window", "qwen2-window")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4")
REFUSED = {
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo3", "gpt_oss", *LATENT), EXCHANGED_HEADS),
    **dict.fromkeys(WINDOWS, ("cp4 comm=a2a+p2p",)),
}
"""Exchanges that a model's attention does not have: of soft caps, two rotary embeddings, sinks, latent heads and
windows."""
WITHOUT_ETP = ("gpt_oss",)
"""Experts with biases, which Megatron-Core does not divide."""
ADAPTED = ("tp2 sp", "pp2 vpp2 packed", "cp2 comm=a2a", "dp2 do overlap")
EXPERT_ADAPTED = ("dp2 ep2 do",)
QUICK = {
    "gemma2": ("single",),
    "gpt_oss": ("packed", "cp2 comm=all_gather"),
    "deepseek_v3": ("dp2 ep2", "pp2 vpp2"),
    "olmo3": ("tp2 sp packed",),
    "glm4": ("tp2 sp",),
    "qwen2_moe": ("pp2", "tp2 sp etp2"),
    "minimax_m2": ("cp2",),
    "mistral-window": ("cp2 packed comm=a2a",),
    "qwen3_next": ("cp2 packed comm=a2a",),
    "arcee": ("tp2 sp",),
    "hunyuan_v1_dense": ("tp2 sp packed",),
    "ministral3": ("cp2 packed comm=a2a",),
}
"""Of the default run: families that differ most."""
QUICK_REFUSED = {"olmo3": ("cp2 comm=a2a",)}
ADAPTERS = (5, 6, 7, 8)
"""Seeds of adapters; the first is taken with which no router's choice is nearly a tie."""


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
        kinds = (*KINDS, *(EXPERT_KINDS if is_moe(name) and name not in WITHOUT_ETP else ()))
        yield from parameters(name, tuple(k for k in kinds if k not in REFUSED.get(name, ())), QUICK, turn)


def refused_cases() -> Iterator[Any]:
    """Every model under the exchanges that it does not have."""
    for name, texts in REFUSED.items():
        yield from parameters(name, texts, QUICK_REFUSED)


def adapter_cases() -> Iterator[Any]:
    """Every family under every layout of ADAPTED."""
    for name in FAMILIES.names():
        texts = (*ADAPTED, *(EXPERT_ADAPTED if is_moe(name) else ()))
        yield from parameters(name, tuple(t for t in texts if t not in REFUSED.get(name, ())), {})


@pytest.mark.parametrize("case", family_cases())
def test_family(case: Case, te_pool: Pool, references: References) -> None:
    """What each family asks of norms, experts, windows, sinks, soft caps and rotary embeddings."""
    check(case, te_pool, references)


@pytest.mark.parametrize("case", adapter_cases())
def test_adapters(case: Case, te_pool: Pool, adapters: Adapters) -> None:  # noqa: F811
    """Adapters on every projection that a family has."""
    task, want = adapters.settled(case, ADAPTERS)
    got = te_pool.run(TRAIN, task, case.world)[0]
    differences = compare(got, want, task.recipe)
    assert_within_limits(differences, case, te_pool, task.folder, task.options)


@pytest.mark.parametrize("case", refused_cases())
def test_refused_exchange(case: Case, te_pool: Pool, references: References) -> None:
    """Before a layer is built, with the reason and what to choose."""
    with pytest.raises(
        RankError, match=rf"--cp_comm_type {re.escape(case.comm)}: .* needs Transformer Engine"
    ) as error:
        check(case, te_pool, references)
    assert "try: --cp_comm_type all_gather, or leave it out" in str(error.value)
