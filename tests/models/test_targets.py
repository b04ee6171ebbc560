"""What a user's names of targets mean, experts that share a parameter included."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.models.published.hybrid import QWEN3_6_27B, QWEN3_NEXT_80B_A3B
from megaswift.models.published.moe import GPT_OSS_20B, HY3
from megaswift.models.published.table import QWEN3_0_6B, QWEN3_30B_A3B
from megaswift.models.targets import modules_to_save_tensor_names, partial_expert_problems, select_projections

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def chosen(config: dict[str, Any], modules: tuple[str, ...], parameters: tuple[str, ...] = ()) -> list[Any]:
    """The projections of a published model."""
    family = family_of(config)
    return select_projections(family, family.spec(config), modules, parameters)


def refused(config: dict[str, Any], modules: tuple[str, ...], parameters: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as error:
        chosen(config, modules, parameters)
    return str(error.value)


def test_all_linear_leaves_shared_parameters_out() -> None:
    """As PEFT's does; the parameters are asked for by their names, whole, in part or by a pattern."""
    layers, experts = 24, 32
    assert {p.leaf for p in chosen(GPT_OSS_20B, ("all-linear",))} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    both = chosen(GPT_OSS_20B, ("q_proj",), STACKS)
    assert len(both) == layers + 2 * layers * experts
    one = chosen(GPT_OSS_20B, (), ("model.layers.3.mlp.experts.down_proj",))
    assert {p.stack for p in one} == {"model.layers.3.mlp.experts.down_proj"} and len(one) == experts
    assert one == chosen(GPT_OSS_20B, (), (r".*\.3\.mlp\.experts\.down_proj",))
    assert {p.shape for p in both} == {(4096, 2880), (2 * 2880, 2880), (2880, 2880)}


def test_projections_of_gated_delta_nets_are_modules_and_their_convolutions_are_not() -> None:
    """As PEFT's all-linear; Megatron's name means all modules that its layer joins."""
    usual = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj"}
    inputs = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert {p.leaf for p in chosen(QWEN3_6_27B, ("all-linear",))} == usual | inputs
    assert {p.leaf for p in chosen(QWEN3_6_27B, ("in_proj",))} == inputs
    assert {p.leaf for p in chosen(QWEN3_NEXT_80B_A3B, ("in_proj",))} == {"in_proj_qkvz", "in_proj_ba"}
    assert len(chosen(QWEN3_6_27B, ("out_proj",))) == 48
    assert "--modules_to_save conv1d" in refused(QWEN3_6_27B, ("conv1d",))


@pytest.mark.parametrize(
    "config, modules, parameters, told",
    [
        (
            GPT_OSS_20B,
            ("gate_up_proj",),
            (),
            "is not a module but a parameter with all experts stacked\n    try: --target_parameters mlp.experts.",
        ),
        (GPT_OSS_20B, ("linear_fc2",), (), "--target_parameters mlp.experts.down_proj"),
        (
            GPT_OSS_20B,
            (),
            ("experts.up_proj",),
            "--target_parameters experts.up_proj: matches no stacked expert parameter",
        ),
        (GPT_OSS_20B, (), ("gate_up_proj_bias",), "matches no stacked expert parameter"),
        (GPT_OSS_20B, (), ("(down",), "--target_parameters (down: is not a regular expression"),
        (GPT_OSS_20B, (), (), "--target_modules none: leaves nothing to adapt"),
        (
            QWEN3_30B_A3B,
            ("all-linear",),
            STACKS[1:],
            "each expert has its own\n    try: --target_modules gate_proj up_proj down_proj",
        ),
        (QWEN3_0_6B, ("all-linear",), STACKS[1:], "this model has no experts"),
    ],
)
def test_names_that_mean_nothing(
    config: dict[str, Any], modules: tuple[str, ...], parameters: tuple[str, ...], told: str
) -> None:
    assert told in refused(config, modules, parameters)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("gate_proj",), "model.layers.0.mlp.experts.0.up_proj"),
        (("gate_proj", "up_proj"), "model.layers.0.mlp.experts.0.down_proj"),
        ((r".*layers\.3\.mlp\.experts\.[0-6]\..*",), "model.layers.3.mlp.experts.7.gate_proj"),
        (("down_proj",), ""),
        (("all-linear",), ""),
        (("q_proj",), ""),
        ((r".*layers\.3\.mlp\.experts\..*",), ""),
    ],
)
def test_experts_have_adapters_as_peft_finds_them(names: tuple[str, ...], left: str) -> None:
    family = family_of(QWEN3_30B_A3B)
    spec = family.spec(QWEN3_30B_A3B)
    problems = partial_expert_problems(family, spec, select_projections(family, spec, names))
    assert [p.rule.split()[2] for p in problems] == ([left + ":"] if left else [])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("gate_proj", "up_proj", "down_proj"), "model.layers.1.mlp.shared_mlp.gate_proj"),
        (("all-linear",), "model.layers.1.mlp.shared_mlp.gate_proj"),
        (("shared_mlp.down_proj",), "model.layers.1.mlp.shared_mlp.down_proj"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), ""),
    ],
)
def test_modules_that_transformers_renames_have_no_adapters(names: tuple[str, ...], found: str) -> None:
    """transformers has Hy3's `shared_mlp` as `shared_experts`: PEFT does not find the name of the folder."""
    family = family_of(HY3)
    spec = family.spec(HY3)
    problems = partial_expert_problems(family, spec, select_projections(family, spec, names))
    assert [p.rule.split()[1] for p in problems] == ([found + ":"] if found else [])


def test_modules_to_save_by_megatron_s_names() -> None:
    """As Megatron-SWIFT's examples name them; a tied output layer is refused under both names."""
    family = family_of(QWEN3_30B_A3B)
    saved = modules_to_save_tensor_names(family, family.spec(QWEN3_30B_A3B), ["word_embeddings", "output_layer"])
    assert saved == ["model.embed_tokens.weight", "lm_head.weight"]
    tied = family_of(QWEN3_0_6B)
    with pytest.raises(ConfigError, match="--modules_to_save word_embeddings: is tied to the output layer"):
        modules_to_save_tensor_names(tied, tied.spec(QWEN3_0_6B), ["word_embeddings"])
