"""Vision-language folders of Qwen3.5 and 3.6: the language model is the family's, everything else comes back as it was.

Covers: megaswift/families/qwen3_5.py, megaswift/families/qwen3_5_moe.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.bridge.hf.source import HfSource
from megaswift.bridge.plan import WeightPlan
from megaswift.errors import UserError, WeightsError
from megaswift.families import family_of, load_spec
from megaswift.models.family import unreadable_value_problems
from megaswift.models.published.hybrid import QWEN3_6_27B
from megaswift.models.weights.rules import TensorParallelShard
from tests.vision_language_folders import config_of, write_vision_language

FORMS = {"dense": ("qwen3_5", False), "split": ("qwen3_5_moe", False), "stacked": ("qwen3_5_moe", True)}
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in made:
            home = tmp_path_factory.mktemp(form)
            made[form] = write_vision_language(home, *FORMS[form], dtype=torch.bfloat16)
        return made[form]

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_comes_back_bit_for_bit(form: str, folder: Folder, tmp_path: Path) -> None:
    """Vision tower, multi-token prediction, dtypes and config.json, and experts in their own form."""
    source = folder(form)
    hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    had, has = tensors(source), tensors(back)
    assert had.keys() == has.keys() and any(name.startswith("mtp.") for name in had)
    assert [n for n, t in had.items() if t.dtype != has[n].dtype or not torch.equal(t, has[n])] == []
    assert config_of(back) == config_of(source)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_carried(form: str, folder: Folder) -> None:
    spec = load_spec(folder(form))
    plan = WeightPlan(family_of(spec.hf_config), spec)
    source = HfSource(folder(form))
    assert plan.check(source) == []
    kept = plan.kept(source.names())
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in kept} == {
        "model.visual",
        "mtp.fc",
        "mtp.layers",
        "mtp.norm",
    }
    assert len(kept) + len(plan.by_hf) == len(source.names())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_both_forms_of_experts_give_the_same_shards(tp: int, folder: Folder) -> None:
    found = []
    for form in ("split", "stacked"):
        spec = load_spec(folder(form))
        assert spec.stacked_experts is (form == "stacked")
        plan = WeightPlan(family_of(spec.hf_config), spec)
        entries = [entry for name, entry in plan.by_megatron.items() if ".experts." in name]
        assert all(entry.rule.pieces(spec, TensorParallelShard(tp, 0, expert=0)) for entry in entries)
        source = HfSource(folder(form))
        found.append({e.megatron: [e.read(source, tp=tp, rank=r) for r in range(tp)] for e in entries})
    split, stacked = found
    assert split.keys() == stacked.keys() and len(split) == 4 * 4 * 2
    assert [n for n, parts in split.items() if not all(map(torch.equal, parts, stacked[n]))] == []


def test_a_config_without_weights_is_published_form() -> None:
    """The published files are stacked; transformers saves a language model's experts one by one."""
    nested = {"text_config": {}, "vision_config": {}}
    assert family_of({"model_type": "qwen3_5_moe", **nested}).fixed["stacked_experts"] is True
    assert "stacked_experts" not in family_of({"model_type": "qwen3_5_moe_text"}).fixed


def test_the_language_model_is_the_text_family() -> None:
    """Of the nested fields, and of those above them; its own file says the same."""
    text = {k: v for k, v in QWEN3_6_27B.items() if k not in ("architectures", "tie_word_embeddings")}
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"depth": 1},
        "image_token_id": 5,
    }
    spec = family_of(whole).spec(whole)
    alone = family_of(QWEN3_6_27B).spec({**QWEN3_6_27B, "tie_word_embeddings": True})
    assert spec.transformer == alone.transformer and spec.rope == alone.rope and spec.tied
    assert spec.hf_config == whole and spec.language_config == text
    for wrong, words in (({"hidden_actt": 1}, "hidden_actt"), ({"hidden_act": "gelu"}, "hidden_act")):
        with pytest.raises(WeightsError, match=words):
            family_of(whole).spec({**whole, "text_config": {**text, **wrong}})
    nulls = {**whole, "text_config": {**text, "num_key_value_heads": None}}
    assert ["num_key_value_heads null" in str(p) for p in unreadable_value_problems(nulls)] == [True]
    with pytest.raises(WeightsError, match="text_config.* must be a JSON object"):
        family_of(whole).spec({**whole, "text_config": None})


def test_other_vision_language_models_stay_refused(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is a vision-language model"):
        load_spec(tmp_path)
