"""Folders with other names than a family's own, against transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import WeightsError
from megaswift.families import family_of, load_spec
from tests.bridge.adapters.test_merge import ATTENTION, IDS, by_peft, merged, written

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def renamed(folder: Path, names: dict[str, str | None], prefix: bool = True) -> Path:
    """Tensors under other names (None: gone), with or without `model.`."""
    stored = load_file(folder / "model.safetensors")
    tensors = {names.get(name, name): tensor for name, tensor in stored.items()}
    cut = {name if prefix else name.removeprefix("model."): t.clone() for name, t in tensors.items() if name}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("tied", "names", "prefix"),
    [
        (True, {EMBEDDING: HEAD}, True),
        (True, {}, True),
        (True, {}, False),
        (True, {EMBEDDING: HEAD}, False),
        (False, {}, False),
    ],
    ids=["tied, head alone", "tied, embedding alone", "no prefix", "no prefix, head alone", "untied, no prefix"],
)
def test_tensors_are_found_under_the_names_that_transformers_takes(
    tied: bool, names: dict[str, str | None], prefix: bool, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(base, adapter, tied, ATTENTION)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
        renamed(base, names, prefix)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(base)(IDS).logits, want)
    spec = load_spec(base)
    weights = WeightPlan(family_of(spec.hf_config), spec)
    source = open_weights(base)
    assert weights.check(source) == [] and set(source.names()) == set(weights.hf_shapes)
    assert source.slice(EMBEDDING).shape == (120, 32) and source.file(EMBEDDING) == base / "model.safetensors"
    assert float((merged(base, adapter, tmp_path / "merged") - by_peft(base, adapter)).abs().max()) < 1e-5
    assert set(load_file(tmp_path / "merged/model.safetensors")) == set(weights.hf_shapes)


@pytest.mark.parametrize("missing", [EMBEDDING, HEAD])
def test_an_untied_model_needs_both(missing: str, tmp_path: Path) -> None:
    written(tmp_path / "base", tmp_path / "adapter", False, ATTENTION)
    renamed(tmp_path / "base", {missing: None})
    spec = load_spec(tmp_path / "base")
    with pytest.raises(WeightsError, match=f"tensor {missing}: is missing"):
        WeightPlan(family_of(spec.hf_config), spec).check(open_weights(tmp_path / "base"))


def test_a_family_whose_config_leaves_out_that_it_is_tied(tmp_path: Path) -> None:
    """Gemma's default."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    renamed(tmp_path, {EMBEDDING: HEAD})
    assert EMBEDDING in open_weights(tmp_path).names()


@pytest.mark.parametrize("prefix", ["module.", "base_model.model."])
def test_another_prefix_is_told_in_one_line(prefix: str, tmp_path: Path) -> None:
    written(tmp_path / "base", tmp_path / "adapter", True, ATTENTION)
    names = load_file(tmp_path / "base/model.safetensors")
    renamed(tmp_path / "base", {name: prefix + name for name in names})
    spec = load_spec(tmp_path / "base")
    with pytest.raises(WeightsError, match=f"stores its tensors with the prefix '{prefix}'") as caught:
        WeightPlan(family_of(spec.hf_config), spec).check(open_weights(tmp_path / "base"))
    assert len(caught.value.problems) == 1
