"""Every parallel layout on Transformer Engine's modules against Hugging Face: its own Python, over torch functions in
place of its kernels (tests/te).

Covers: megaswift/engine/megatron/layers/classes.py,
megaswift/engine/megatron/layers/post_norm.py,
megaswift/engine/megatron/layers/spec.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megaswift.families import FAMILIES, family_of
from megaswift.parallel.te_attention import te_unsupported_attention_features
from tests.parity import cover_te
from tests.parity.cases import Case, parse
from tests.parity.check import check
from tests.parity.measure import build
from tests.parity.models import build as build_model
from tests.parity.models import is_moe
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


def classes(rank: int, world: int, folders: dict[str, Path]) -> dict[str, set[str]]:
    """Model -> classes of its modules that compute something (on the rank)."""
    found, context = {}, None
    for name, folder in folders.items():
        case = replace(parse("single", model=name), te=True)
        engine, context = build(case, folder, world)
        own = [
            type(m)
            for chunk in engine.plain
            for m in chunk.decoder.modules()
            if not type(m).__module__.startswith("torch")
        ]
        found[name] = {t.__name__ for t in own}
        context.close()
    return found


@pytest.mark.process
def test_modules_are_transformer_engines(te_pool: Pool, models: Path) -> None:
    """No family multiplies, normalizes or routes tokens by torch's modules; attention is torch's where the support
    table says so."""
    names = FAMILIES.names()
    (found,) = te_pool.run("tests.parity.test_te:classes", {n: build_model(n, models / n) for n in names}, 1)
    for name in names:
        raw = json.loads((models / name / "config.json").read_text())
        assert not found[name] & {"ColumnParallelLinear", "RowParallelLinear", "NormColumnParallelLinear"}, name
        assert not found[name] & {"TorchNorm", "QKNorm", "ReplicatedLinear", "ScaledPostNormLinear"}, name
        attention = (
            "TorchAttention"
            if te_unsupported_attention_features(family_of(raw).spec(raw))
            else "PackedTEDotProductAttention"
        )
        assert found[name] & {"TorchAttention", "PackedTEDotProductAttention"} == {attention}, name
        assert ("TEGroupedMLP" in found[name]) == is_moe(name) and "SequentialMLP" not in found[name], name


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("qwen2_moe te dp2 ep2", {"moe_shared_expert_overlap": True}),
        ("moe te dp2 ep2 do", {"moe_router_fusion": True}),
        ("moe te dp2 ep2 packed", {"moe_permute_fusion": False}),
        ("moe te tp2 sp ep2", {"moe_grouped_gemm": False}),
        ("gpt_oss te single", {"moe_grouped_gemm": False}),
        ("moe te single packed", {"moe_grouped_gemm_impl": "torch"}),
        ("moe te tp2 sp dp2 ep2 etp2 do", {"moe_grouped_gemm_impl": "torch"}),
        pytest.param("gpt_oss te dp2 ep2", {"moe_grouped_gemm_impl": "torch"}, marks=pytest.mark.slow),
        pytest.param("moe te tp2 sp pp2 packed do", {"moe_grouped_gemm_impl": "torch"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_of_experts(text: str, options: dict[str, Any], te_pool: Pool, references: References) -> None:
    """What the other cases take as it is by default."""
    check(parse(text), te_pool, references, options)


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "dense te dp2 do",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("dense te tp2 sp dp2 do overlap", "dense te pp2 vpp2 dp2 do", "moe te tp2 sp dp2 ep2 etp2 do")
        ),
    ],
)
def test_precision_aware_optimizer(text: str, te_pool: Pool, references: References) -> None:
    """Transformer Engine's optimizer holds main weights and moments itself."""
    check(parse(text), te_pool, references, {"precision_aware_optimizer": True})


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    ["dense te tp2 sp packed", pytest.param("moe te cp2 comm=p2p packed", marks=pytest.mark.slow), "moe te dp2 ep2 do"],
)
def test_the_newest_release(text: str, references: References) -> None:
    """Other sources of Transformer Engine under the same stand-ins."""
    check(parse(text), shared(RELEASES[-1]), references)


@pytest.mark.wide
def test_every_pair_occurs() -> None:
    """Any two choices that some case of four ranks combines are combined in a case of the default run, and each with
    each model."""
    keys = ("model", *cover_te.KEYS)

    def pairs(cases: Iterable[Case]) -> set[object]:
        return {(a, getattr(c, a), b, getattr(c, b)) for c in cases for a, b in combinations(keys, 2)}

    for model in ("dense", "moe"):
        assert pairs(cover_te.joint()) >= pairs(cover_te.candidates(model))
        assert all(parse(str(c)) == c for c in cover_te.every(model))
    assert len(cover_te.joint()) < 35
