"""Models with a block that the native engine lacks are refused with the block and the engines that train them.

Covers: megaswift/models/missing_blocks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.errors import WeightsError
from megaswift.families import FAMILIES, family_of
from megaswift.models.any_model import spec_from_family
from megaswift.models.missing_blocks import MISSING_BLOCKS, TORCH_ENGINES
from tests.models.test_unsupported import mistakes


def refusal(model_type: str) -> str:
    """The one problem of the native engine with a model of this type."""
    with pytest.raises(WeightsError) as error:
        family_of({"model_type": model_type})
    (problem,) = error.value.problems
    return f"{problem.what}: {problem.rule}; {problem.fix}"


@pytest.mark.parametrize("name", MISSING_BLOCKS)
def test_the_block_is_named(name: str) -> None:
    text = refusal(name)
    assert f"it has {MISSING_BLOCKS[name]}, which --engine megatron does not compute; {TORCH_ENGINES}" in text
    assert "\n" not in text and ". " not in text and not text.endswith(".")
    assert spec_from_family({"model_type": name}) is None


def test_every_type_is_a_language_model_of_transformers_without_a_family() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MISSING_BLOCKS) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not set(MISSING_BLOCKS) & set(FAMILIES.names())
    assert list(MISSING_BLOCKS) == sorted(MISSING_BLOCKS)


def test_any_other_type_gets_the_list_of_families() -> None:
    text = refusal("gpt2")
    assert "supported are" in text and "qwen3" in text and TORCH_ENGINES in text
    assert "does not compute" not in text


@pytest.mark.parametrize(("words", "refused"), [(["--engine", "megatron"], True), (["--engine", "auto"], False)])
def test_a_run_hears_it_from_the_native_engine_alone(words: list[str], refused: bool, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 1024}
    found = mistakes({"model_type": "mamba2", **sizes}, tmp_path, *words)
    assert any("Mamba-2" in text for text in found) == refused
