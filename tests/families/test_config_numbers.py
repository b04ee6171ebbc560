"""Numbers of a config.json that no model can have are refused before anything is read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from megaswift.config import load_config
from megaswift.errors import WeightsError
from megaswift.families import FAMILIES
from megaswift.models.family import rope_and_epsilon_problems, unreadable_value_problems
from megaswift.run.checks.model_spec import model_spec_for_task
from tests.parity.models import VARIANTS, config
from tests.trainers.inputs import write_model


@pytest.mark.parametrize(
    "raw, what",
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon: 0"),
        ({"rope_theta": 0}, "rope_theta: 0"),
        ({"rope_theta": -1.0}, "rope_theta: -1.0"),
        ({"rope_theta": "10000"}, "rope_theta: 10000"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_parameters.rope_theta: inf"),
        (
            {"text_config": {"rope_parameters": {"full": {"rope_theta": 0}}}},
            "text_config.rope_parameters.full.rope_theta: 0",
        ),
    ],
)
def test_a_number_that_cannot_be(raw: dict[str, Any], what: str) -> None:
    (problem,) = rope_and_epsilon_problems(raw)
    assert problem.what == f"config.json, {what}" and "above 0" in problem.rule


def test_ordinary_ones_and_those_left_out() -> None:
    assert not list(
        rope_and_epsilon_problems({"rms_norm_eps": 1e-6, "rope_theta": None, "rope_scaling": None, "eps": -1})
    )


@pytest.mark.parametrize("engine", ["megatron", "ddp"])
@pytest.mark.parametrize(
    "more, what",
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window 0: must be at least 1"),
    ],
)
def test_both_engines_look(engine: str, more: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    cfg = load_config("sft", ["--model", str(folder), "--engine", engine], environ={})
    with pytest.raises(WeightsError, match=what):
        model_spec_for_task(cfg, folder)


def test_null_key_value_heads() -> None:
    """Refused where transformers cannot make a model of them, and nowhere else."""
    variants = {model_type: name for name, (model_type, _) in reversed(VARIANTS.items())}
    for kind in (name for name in FAMILIES.names() if not FAMILIES.get(name).text):
        raw = config(variants[kind]).to_dict() | {"num_key_value_heads": None}
        problems = list(unreadable_value_problems(raw))
        assert bool(problems) == refused_by_transformers(raw), kind
        if problems:
            assert str(problems[0]).startswith(f"config.json ({kind}), num_key_value_heads null: must be a number")
            assert '"num_key_value_heads": 8' in str(problems[0])


UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"query_pre_attn_scalar": 16.0}, 'query_pre_attn_scalar 16.0: must be an integer.*": 16$'),
    ("gemma3_text", {"query_pre_attn_scalar": 16.5}, "query_pre_attn_scalar 16.5: must be an integer"),
    ("exaone4", {"sliding_window": None, "layer_types": None}, "sliding_window null: needs layer_types"),
    ("exaone4", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern 0: needs layer_types"),
    ("hunyuan_v1_dense", {"head_dim": None}, 'head_dim null: must be given.*"head_dim": 8$'),
]


@pytest.mark.parametrize("variant, more, what", UNREADABLE)
def test_what_transformers_does_not_read(variant: str, more: dict[str, Any], what: str) -> None:
    standard = config(variant).to_dict()
    (problem,) = unreadable_value_problems(standard | more)
    assert re.search(what, str(problem), re.DOTALL) and refused_by_transformers(standard | more)
    assert not list(unreadable_value_problems(standard)) and not refused_by_transformers(standard)


def refused_by_transformers(raw: dict[str, Any]) -> bool:
    """Whether it can make no configuration, or no model, of these fields."""
    fields = {k: v for k, v in raw.items() if k != "model_type"}
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **fields))
    except (StrictDataclassError, TypeError, ZeroDivisionError):
        return True
    return False
