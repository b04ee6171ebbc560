"""Whose products and whose attention a run takes, with the reasons."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.engine.megatron.layers import implementation
from megaswift.engine.megatron.layers.implementation import (
    LayerImplementationChoice,
    choose_layer_implementation,
    fp8_blockwise_sp_hidden_size_problems,
    fp8_width_problems,
    transformer_engine_unusable_reason,
)
from megaswift.engine.options.te import VERSIONS
from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.models.published.moe import GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B
from megaswift.models.published.table import MISTRAL_7B, PUBLISHED, QWEN3_0_6B
from megaswift.parallel.layout import Layout
from megaswift.parallel.te_attention import te_unsupported_attention_features
from tests.parity.models import config
from tests.sources import ROOT

GPT_OSS, OLMOE, QWEN, MISTRAL, QWEN3 = (
    family_of(c).spec(c) for c in (GPT_OSS_20B, OLMOE_1B_7B, QWEN1_5_MOE_A2_7B, MISTRAL_7B, QWEN3_0_6B)
)
DENSE, MOE = (family_of(c).spec(c) for c in (config(variant).to_dict() for variant in ("dense", "moe")))
DEEPSEEK = family_of(PUBLISHED["deepseek-v3"][0]).spec(PUBLISHED["deepseek-v3"][0])


GEMMA2, GEMMA3 = (family_of(PUBLISHED[n][0]).spec(PUBLISHED[n][0]) for n in ("gemma-2-2b", "gemma-3-1b"))


@pytest.mark.parametrize(
    ("model", "comm", "packing", "own"),
    [
        (OLMOE, None, True, ""),
        (GPT_OSS, None, False, ""),
        (GPT_OSS, None, True, "attention sinks with packed rows"),
        (GPT_OSS, "a2a", False, "attention sinks with context parallelism"),
        (GEMMA2, None, False, "soft caps"),
        (GEMMA3, None, False, "a second rotary embedding"),
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
def test_attention_that_transformer_engine_lacks(model: Any, comm: str | None, packing: bool, own: str) -> None:
    reasons = te_unsupported_attention_features(model, comm, packing)
    assert len(reasons) == bool(own) and all(reason.startswith(own) for reason in reasons)


def chosen(model: Any, monkeypatch: pytest.MonkeyPatch, lack: str = "", **options: Any) -> LayerImplementationChoice:
    """The choice on a machine that lacks `lack`."""
    monkeypatch.setattr(implementation, "transformer_engine_unusable_reason", lambda: lack)
    cfg = SwiftConfig(task="sft", **options)
    return choose_layer_implementation(model, cfg.model, None, cfg.data.shares_rows)


def test_products_are_transformer_engines_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (GEMMA2, GEMMA3, GPT_OSS, OLMOE, QWEN3, DEEPSEEK):
        assert chosen(model, monkeypatch).linear == "transformer_engine"
    capped = chosen(GEMMA2, monkeypatch)
    assert capped.attention == "torch" and capped.torch_parts() == {"attention": "soft caps on attention scores"}
    assert str(capped) == (
        "transformer_engine (CUDA and Transformer Engine are available), attention: torch (soft caps on attention "
        "scores)"
    )
    assert chosen(QWEN3, monkeypatch).attention == "transformer_engine"
    assert chosen(QWEN3, monkeypatch, attn_impl="sdpa").torch_parts() == {"attention": "--attn_impl sdpa"}
    assert chosen(QWEN3, monkeypatch, transformer_impl="torch").torch_parts() == {
        "products": "asked for",
        "attention": "asked for",
    }


def test_qlora_keeps_transformer_engines_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    got = chosen(QWEN3, monkeypatch, train_type="qlora")
    assert (got.linear, got.attention, got.torch_parts()) == (
        "torch",
        "transformer_engine",
        {"products": "weights in NF4"},
    )


def test_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    got = chosen(QWEN3, monkeypatch, lack="no CUDA device")
    assert (got.linear, got.attention, str(got)) == ("torch", "torch", "torch (no CUDA device)")
    with pytest.raises(ConfigError, match="no CUDA device"):
        chosen(QWEN3, monkeypatch, lack="no CUDA device", transformer_impl="transformer_engine")


def test_gathered_blocks() -> None:
    (problem,) = fp8_blockwise_sp_hidden_size_problems("blockwise", 192, Layout(2, tp=2, sequence_parallel=True))
    assert "divisible by 128" in problem.rule and "192" in problem.rule
    assert fp8_blockwise_sp_hidden_size_problems("blockwise", 256, Layout(2, tp=2, sequence_parallel=True)) == []
    assert fp8_blockwise_sp_hidden_size_problems("blockwise", 192, Layout(2, tp=2)) == []
    assert fp8_blockwise_sp_hidden_size_problems("delayed", 192, Layout(2, tp=2, sequence_parallel=True)) == []


@pytest.mark.parametrize(("version", "own"), [("0.16.1", True), ("0.19.2", False)])
def test_packed_latent_attention(version: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    assert bool(te_unsupported_attention_features(DEEPSEEK, None, True)) == own
    assert te_unsupported_attention_features(QWEN3, None, True) == []


@pytest.mark.parametrize(
    ("recipe", "layout", "rules"),
    [
        ("delayed", Layout(2, tp=2), []),
        (
            "tensorwise",
            Layout(4, tp=4),
            ["MLP width on each rank that is divisible by 16; here it is 96 / 4 ranks = 24"],
        ),
        ("mxfp8", Layout(2, tp=2), ["MLP width on each rank that is divisible by 32; here it is 96 / 2 ranks = 48"]),
        ("mxfp8", Layout(1), []),
    ],
)
def test_widths_that_fp8_cannot_multiply(recipe: str, layout: Layout, rules: list[str]) -> None:
    """The tests' dense model: hidden size 64, 8 heads of 16, 4 for keys, MLP of 96."""
    found = fp8_width_problems(recipe, DENSE, layout)
    assert [p.rule for p in found] == [f"needs a {rule}" for rule in rules]


def test_widths_of_experts() -> None:
    """Experts of 48, no dense MLP; expert tensor parallelism divides them."""
    assert fp8_width_problems("delayed", MOE, Layout(1)) == []
    (problem,) = fp8_width_problems("mxfp8", MOE, Layout(1))
    assert "width of an expert on each rank that is divisible by 32; here it is 48" in problem.rule
    (problem,) = fp8_width_problems("delayed", MOE, Layout(2, etp=2, tp=2))
    assert "48 / 2 ranks = 24" in problem.rule and problem.fix.startswith("fewer expert-tensor-parallel ranks")


@pytest.mark.parametrize(("cuda", "core"), [("13.0", "core_cu13,"), ("12.6", "core_cu12,")])
def test_a_gpu_without_transformer_engine_names_the_command(
    cuda: str, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row `kernels` shows the reason, and `megaswift doctor` the same command."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = f"pip install --no-build-isolation 'transformer-engine[{core}pytorch]>=2.12,<2.21'"
    assert transformer_engine_unusable_reason() == f"Transformer Engine is not installed: {command}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformer-engine[{core}pytorch]{VERSIONS}" in (*extras["gpu"], *extras["gpu-cu12"])
