"""`--model_type` against config.json, by transformers' names and ms-swift's."""

from __future__ import annotations

import pytest

from megaswift.families import FAMILIES
from megaswift.models.model_type import MS_SWIFT_TYPES, model_type_option_mismatch_problems


@pytest.mark.parametrize("wanted", [None, "qwen", "qwen2", "qwen2_5", "deepseek_r1_distill"])
def test_names_of_the_architecture(wanted: str | None) -> None:
    assert model_type_option_mismatch_problems(wanted, {"model_type": "qwen2"}) == []


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ("deepseek-moe-16b", "deepseek"),
        ("internvl2-8b", "internvl"),
        ("qwen2-7b-instruct", "qwen2"),
        ("qwen2_5-0_5b-instruct", "qwen2"),
        ("llama3_1-8b", "llama"),
    ],
)
def test_names_with_a_size(wanted: str, actual: str) -> None:
    """As ms-swift 2 had them."""
    assert model_type_option_mismatch_problems(wanted, {"model_type": actual}) == []
    assert model_type_option_mismatch_problems(wanted, {"model_type": "phi3"})


@pytest.mark.parametrize("wanted", ["qwen3", "llama3_1", "no_such_model", "qwen3-8b"])
def test_names_of_others(wanted: str) -> None:
    (problem,) = model_type_option_mismatch_problems(wanted, {"model_type": "qwen2"})
    assert problem.what == f"--model_type {wanted}" and "model_type qwen2" in problem.rule
    assert model_type_option_mismatch_problems(wanted, {})


def test_the_table_names_model_types() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert all(name in FAMILIES or name in CONFIG_MAPPING_NAMES for name in MS_SWIFT_TYPES)
