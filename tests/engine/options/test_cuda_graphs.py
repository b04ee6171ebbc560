"""Models whose layers cannot be captured in CUDA graphs; options beside them: test_check_all_option_rules.py."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.cuda_graphs import cuda_graph_model_problems
from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.models.published.deepseek import DEEPSEEK_V3
from megaswift.models.published.moe import QWEN1_5_MOE_A2_7B
from megaswift.models.published.table import QWEN3_0_6B


@pytest.mark.parametrize(
    ("config", "present"),
    [
        (QWEN3_0_6B, []),
        (QWEN3_0_6B | {"attention_dropout": 0.1}, ["dropout"]),
        (QWEN1_5_MOE_A2_7B, ["experts"]),
        (DEEPSEEK_V3, ["experts", "latent attention"]),
    ],
)
def test_models(config: dict[str, Any], present: list[str]) -> None:
    """Each reason, with what to say instead; none without graphs."""
    transformer = family_of(config).spec(config).transformer
    found = cuda_graph_model_problems(SwiftConfig(task="sft", cuda_graph_impl="local"), transformer)
    assert [any(name in p.rule for name in present) for p in found] == [True] * len(present)
    assert all(p.fix == "--cuda_graph_impl none" for p in found)
    assert cuda_graph_model_problems(SwiftConfig(task="sft"), transformer) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cuda_graph_impl transformer_engine", "--cuda_graph_impl transformer_engine: must be one of none | local"),
        ("--cuda_graph_impl local --cp 2 --packing false", "is not supported with context parallelism"),
    ],
)
def test_other_graphs_are_refused_by_one_message(words: str, message: str) -> None:
    """By the options alone, before anything is loaded."""
    with pytest.raises(ConfigError) as caught:
        load_config("sft", ["--model", "m", "--dataset", "d", "--padding_free", "false", *words.split()])
    assert message in caught.value.message() and len(caught.value.problems) == 1
