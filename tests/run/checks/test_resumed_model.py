"""Resuming on a model that computes another function: every field that differs is named; spellings are no
difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.errors import CheckpointError
from megaswift.models.family import read_config_json
from megaswift.run.checks.resumed_model import model_difference_problems, refuse_other_model
from tests.parity.models import build


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that holds the model's configuration."""
    root = tmp_path_factory.mktemp("step-4")
    build("dense", root / "model")
    return root


def names(step: Path, **changes: Any) -> list[str]:
    config = {**read_config_json(step / "model"), **changes}
    return [p.what.removeprefix("model's ") for p in model_difference_problems(step, config)]


def test_the_model_itself_has_no_difference(step: Path) -> None:
    assert names(step) == []
    quiet = {"transformers_version": "9", "dtype": "float16", "initializer_range": 1.0, "attention_dropout": 0.5}
    assert names(step, **quiet, eos_token_id=7, max_position_embeddings=9999, use_cache=False) == []


def test_each_change_of_the_function_is_named(step: Path) -> None:
    config = read_config_json(step / "model")
    rope = config.get("rope_parameters") or {}
    other = {"rope_parameters": {**rope, "rope_theta": 77.0}} if rope else {"rope_theta": 77.0}
    assert names(step, **other) == ["rope.base"]
    assert names(step, rms_norm_eps=1e-3) == ["transformer.layernorm_epsilon"]
    assert len(names(step, rms_norm_eps=1e-3, **other)) == 2
    assert any("vocab" in name for name in names(step, vocab_size=96))
    with pytest.raises(CheckpointError, match=r"rope.base: is .* in the checkpoint and 77.0 in --model\n"):
        refuse_other_model(step, {**config, **other})


def test_windows(tmp_path: Path) -> None:
    folder = build("gemma2", tmp_path / "model")
    config = read_config_json(folder)
    assert model_difference_problems(tmp_path, config) == []
    assert model_difference_problems(tmp_path, {**config, "sliding_window": config["sliding_window"] + 1})


def test_any_other_model_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert model_difference_problems(tmp_path, config | {"torch_dtype": "bfloat16"}) == []
    (found,) = model_difference_problems(tmp_path, config | {"layer_norm_epsilon": 1e-6})
    assert found.what == "model's layer_norm_epsilon" and found.rule.startswith("is 1e-05 in the checkpoint and 1e-06")
    assert model_difference_problems(tmp_path / "nothing", config) == []
