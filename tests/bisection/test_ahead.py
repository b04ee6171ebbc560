"""The reference's layers for multi-token prediction: weights and names, beside the parity tests' own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaswift.bisection.ahead import LayersAhead, check_reference, tokens_ahead
from megaswift.bridge.plan import WeightPlan
from megaswift.errors import UserError
from megaswift.families import family_of
from tests.parity import models
from tests.parity.mtp import MTP, heads, heads_by_disk_name


@pytest.mark.parametrize("variant", ["deepseek_v3-mtp", "qwen3_5_moe-mtp", "qwen3_5-mtp-tied"])
def test_weights_and_names(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = models.build(variant, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    spec = family_of(config).spec(config)
    spec = replace(spec, features=replace(spec.features, mtp_layers=MTP[variant]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ahead = LayersAhead(model, folder, WeightPlan(family_of(config), spec))
    found = dict(ahead.by_disk_name(dict(ahead.named_parameters())))
    expected = dict(heads_by_disk_name(heads(model, folder, MTP[variant]), model.config, lambda p: p))
    buffers = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert found.keys() == expected.keys() - buffers
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    biases = [b for name, b in ahead.layers.named_buffers() if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(b, expected[name]) for b, name in zip(biases, sorted(buffers), strict=True))
    for name in found:
        path = name.removesuffix(".weight")
        assert ahead.module(path) is not None or ".experts." in path
    assert ahead.module("model.layers.0.self_attn") is None


def test_tokens_ahead() -> None:
    assert tokens_ahead("layers.1.mlp") == 0 and tokens_ahead("mtp.layers.1.head") == 2


def test_models_without_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": kinds[:2]}))
    check_reference(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": kinds}))
    with pytest.raises(UserError, match="3 layers end in linear_attention(.|\n)*--layers 2"):
        check_reference(tmp_path)
    from transformers import modeling_layers

    monkeypatch.delattr(modeling_layers, "MtpModel")
    with pytest.raises(UserError, match="needs a reference"):
        check_reference(tmp_path)
