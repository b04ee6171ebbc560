"""Model folders cut to their first layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megaswift.bisection.first_layers import write_first_layers
from megaswift.bridge.hf.source import HfSource
from megaswift.errors import UserError
from tests.parity import models


@pytest.mark.parametrize("variant", ["qwen3_5_moe", pytest.param("dense", marks=pytest.mark.slow)])
def test_the_first_layers_stay(variant: str, tmp_path: Path) -> None:
    """transformers computes with the folder what the first layers of the whole model compute."""
    from transformers import AutoModelForCausalLM

    source = models.build(variant, tmp_path / "whole")
    cut = write_first_layers(source, tmp_path / "cut", 2)
    assert not any(file.is_symlink() for file in cut.iterdir()), "a run refuses links out of a model's folder"
    ids = torch.arange(3, 20)[None]
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    first = AutoModelForCausalLM.from_pretrained(cut, dtype=torch.float32)
    assert len(first.model.layers) == 2 and first.config.layer_types == whole.config.layer_types[:2]
    whole.model.layers = whole.model.layers[:2]
    assert torch.equal(first(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


def test_layers_for_multi_token_prediction_follow_the_first_ones(tmp_path: Path) -> None:
    source = models.build("glm4_moe-mtp", tmp_path / "whole")
    cut = HfSource(write_first_layers(source, tmp_path / "cut", 2))
    whole = HfSource(source)
    own = [name for name in whole.names() if name.startswith("model.layers.4.")]
    assert own and torch.equal(cut.slice("model.layers.2.eh_proj.weight"), whole.slice("model.layers.4.eh_proj.weight"))
    renamed = {name.replace(".4.", ".2.", 1) for name in own}
    assert {name for name in cut.names() if ".layers." in name and ".layers.2." not in name} == {
        name for name in whole.names() if ".layers.0." in name or ".layers.1." in name
    }
    assert {name for name in cut.names() if ".layers.2." in name} == renamed


def test_more_layers_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(UserError, match="num_hidden_layers 2"):
        write_first_layers(tmp_path, tmp_path / "cut", 3)
