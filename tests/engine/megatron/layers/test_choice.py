"""Which layers a run takes where Transformer Engine's do not compute what the model or the layout needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megaswift.config.sections import OPTIONS
from megaswift.engine.megatron.layers.choice import (
    FP8_NEEDS,
    choose_layer_impl,
    fp8_problems,
    torch_only_features,
    torch_only_reasons,
)
from megaswift.errors import ConfigError
from megaswift.families import family_of
from tests.families.published import MISTRAL_7B, PUBLISHED, QWEN3_0_6B
from tests.families.published_moe import GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B

GPT_OSS, OLMOE, QWEN, MISTRAL, QWEN3 = (
    family_of(c).spec(c) for c in (GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B, MISTRAL_7B, QWEN3_0_6B)
)
DEEPSEEK = family_of(PUBLISHED["deepseek-v3"][0]).spec(PUBLISHED["deepseek-v3"][0])


def test_what_a_model_needs() -> None:
    assert (
        torch_only_features(OLMOE) == ["qk_norm_width"]
        and torch_only_features(GPT_OSS) == ["attention sinks"]
        and torch_only_features(QWEN) == []
    )
    lacking = ", ".join(torch_only_features(GPT_OSS))
    assert choose_layer_impl("auto", lacking=lacking) == (
        "torch",
        "Transformer Engine's layers do not support attention sinks, which this model needs",
    )
    with pytest.raises(ConfigError, match="attention sinks"):
        choose_layer_impl("transformer_engine", lacking=lacking)


@pytest.mark.parametrize(
    ("model", "comm", "packing", "lacking"),
    [
        (MISTRAL, "p2p", False, "sliding windows"),
        (MISTRAL, "a2a", False, ""),
        (MISTRAL, None, True, ""),
        (QWEN3, "p2p", True, ""),
        (QWEN3, "all_gather", True, "packed rows"),
        (QWEN3, "all_gather", False, ""),
        (DEEPSEEK, "a2a", False, "latent attention"),
        (DEEPSEEK, "p2p", False, ""),
        (DEEPSEEK, None, False, ""),
    ],
)
def test_what_a_layout_needs(model: Any, comm: str | None, packing: bool, lacking: str) -> None:
    found = torch_only_reasons(model, comm, packing)
    assert [f for f in found if not f.startswith(lacking)] == [] and bool(found) == bool(lacking)


@pytest.mark.parametrize(
    ("recipe", "capability", "told"),
    [
        ("delayed", (8, 0), "8.9 (Ada) or newer; this GPU has 8.0\n    try: --fp8_format none"),
        ("delayed", (8, 9), ""),
        (
            "blockwise",
            (8, 9),
            "9.0 (Hopper) or newer; this GPU has 8.9\n    try: --fp8_recipe tensorwise or --fp8_recipe delayed",
        ),
        ("blockwise", (9, 0), ""),
        ("mxfp8", (9, 0), "10.0 (Blackwell) or newer; this GPU has 9.0\n    try: --fp8_recipe blockwise"),
        ("mxfp8", (12, 0), ""),
    ],
)
def test_fp8_recipes_that_a_gpu_lacks(recipe: str, capability: tuple[int, int], told: str) -> None:
    found = "".join(map(str, fp8_problems(recipe, capability)))
    assert told in found and bool(found) == bool(told)
    assert set(FP8_NEEDS) == set(OPTIONS["fp8_recipe"].choices)


@pytest.mark.parametrize(("version", "torch_only"), [("0.16.1", True), ("0.19.2", False)])
def test_packed_latent_attention(version: str, torch_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    assert bool(torch_only_reasons(DEEPSEEK, None, True)) == torch_only
    assert torch_only_reasons(dataclasses.replace(QWEN3), None, True) == []
