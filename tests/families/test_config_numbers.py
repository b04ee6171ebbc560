"""Numbers of a config.json that no model can have are refused before anything is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.errors import WeightsError
from megaswift.families.family import rope_and_epsilon_problems
from megaswift.trainers.task_model_spec import model_spec_for_task
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
def test_both_engines_look(engine: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": math.nan}))
    cfg = load_config("sft", ["--model", str(folder), "--engine", engine], environ={})
    with pytest.raises(WeightsError, match="rms_norm_eps: nan"):
        model_spec_for_task(cfg, folder)
