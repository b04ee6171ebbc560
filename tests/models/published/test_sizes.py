"""Sizes of published series by name, against the numbers of parameters on the model cards.

Covers: megaswift/models/published/sizes.py, megaswift/models/published/table.py.
"""

from __future__ import annotations

import pytest

from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of
from megaswift.models.published.sizes import MODELS, SIZES, published_model


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_parameters_of_the_model_cards(name: str) -> None:
    config, parameters = SIZES[name]
    family = family_of(config)
    assert WeightPlan(family, family.spec(config)).parameters == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("qwen3-8b", "qwen3-8b"),
    ],
)
def test_names_that_people_type(typed: str, name: str) -> None:
    assert published_model(typed) == (name, MODELS[name][0])


def test_an_unknown_name_is_none() -> None:
    assert published_model("Qwen/Qwen3-9000B") is None
