"""Every folder that PEFT writes for a model with tied, trained, resized or adapted embeddings: merged it has PEFT's
numbers, or it is refused with the reason.

Covers: megaswift/bridge/adapters/peft_merge.py, megaswift/bridge/adapters/targets.py, megaswift/bridge/untied_head.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.adapters.targets import is_target
from megaswift.bridge.plan import WeightPlan
from megaswift.errors import WeightsError
from megaswift.families import family_of, load_spec

IDS = torch.arange(3, 40)[None]
SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EMBEDDINGS = {
    "input": {**ATTENTION, "modules_to_save": ["embed_tokens"]},
    "output": {**ATTENTION, "modules_to_save": ["lm_head"]},
    "both": {**ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    "tied": {**ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "adapter on the output": {"target_modules": ["q_proj", "lm_head"]},
    "adapter on the input": {"target_modules": ["q_proj", "embed_tokens"]},
    "adapters on both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tied adapters": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}
"""LoRA settings by what they train."""


def written(base: Path, adapter: Path, tied: bool, options: dict[str, Any], **saving: Any) -> None:
    """A model, and a folder of PEFT's for it with values that change what it computes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(adapter, **saving)


def by_peft(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, adapter).eval()(IDS).logits


def merged(base: Path, adapter: Path, target: Path) -> torch.Tensor:
    merge_adapter_folder_into_base(base, adapter, target)
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()(IDS).logits


def planned(base: Path, adapter: Path) -> None:
    """As training on the native engine reads a folder."""
    spec = load_spec(base)
    PeftFolder(adapter).plan(WeightPlan(family_of(spec.hf_config), spec), training=True)


def rewritten(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.wide
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("what", EMBEDDINGS)
def test_trained_embeddings_have_peft_s_logits(what: str, tied: bool, tmp_path: Path) -> None:
    """Embeddings that PEFT has trained apart are two tensors afterwards."""
    base, adapter, target = (tmp_path / name for name in ("base", "adapter", "merged"))
    written(base, adapter, tied, EMBEDDINGS[what])
    assert float((merged(base, adapter, target) - by_peft(base, adapter)).abs().max()) < 1e-5
    apart = "lm_head.weight" in load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    assert apart != config["tie_word_embeddings"] and apart == (not tied or not what.startswith("tied"))


@pytest.mark.parametrize("what", EMBEDDINGS)
def test_training_does_not_part_tied_embeddings(what: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(base, adapter, True, EMBEDDINGS[what])
    with pytest.raises(WeightsError, match="convert merge-lora") as caught:
        planned(base, adapter)
    said = str(caught.value)
    assert "use an adapter of this model" not in said
    assert ("belongs to tied embeddings" in said) != ("has an adapter on" in said)


def test_embeddings_that_were_stored_without_training(tmp_path: Path) -> None:
    """PEFT's save_embedding_layers: their values count in a merge; trained on, they would train."""
    for tied in (True, False):
        base, adapter, target = (tmp_path / f"{name}{tied}" for name in ("base", "adapter", "merged"))
        written(base, adapter, tied, ATTENTION, save_embedding_layers=True)
        rewritten(adapter, lambda ts: {n: t * 1.5 if t.shape[0] == 120 else t for n, t in ts.items()})
        assert float((merged(base, adapter, target) - by_peft(base, adapter)).abs().max()) < 1e-5
        assert ("lm_head.weight" in load_file(target / "model.safetensors")) != tied
        with pytest.raises(
            WeightsError, match="belongs to tied embeddings" if tied else "is stored without being trained"
        ):
            planned(base, adapter)


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_is_told(tied: bool, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(base, adapter, tied, ATTENTION, save_embedding_layers=True)
    rewritten(adapter, lambda ts: {n: torch.zeros(125, 32) if t.shape[0] == 120 else t for n, t in ts.items()})
    said = "stores an embedding of 125 rows, the model has 120: its vocabulary was resized before training"
    with pytest.raises(WeightsError, match=said):
        merge_adapter_folder_into_base(base, adapter, tmp_path / "merged")
    written(base, adapter, tied, {"target_modules": ["q_proj", "embed_tokens"]})
    rewritten(adapter, lambda ts: {n: torch.zeros(125, 32) if t.shape == (120, 32) else t for n, t in ts.items()})
    with pytest.raises(WeightsError, match=said):
        merge_adapter_folder_into_base(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    "options",
    [
        ATTENTION,
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[12].*\.(q|o)_proj"},
        {**ATTENTION, "layers_to_transform": [0, 1]},
        {**ATTENTION, "exclude_modules": ["layers.0.self_attn.q_proj"]},
    ],
    ids=str,
)
def test_a_layer_without_its_tensors_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    """All tensors of the second layer are gone; what the settings leave out is not asked for."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(base, adapter, False, options)
    planned(base, adapter)
    rewritten(adapter, lambda tensors: {name: t for name, t in tensors.items() if "layers.1." not in name})
    for door in (planned, lambda *paths: merge_adapter_folder_into_base(*paths, tmp_path / "merged")):
        with pytest.raises(WeightsError) as caught:
            door(base, adapter)
        assert all("layers.1." in problem.what and "is missing" in problem.rule for problem in caught.value.problems)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "layers.1.mlp.up_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": r".*\.(q|up)_proj", "exclude_modules": r".*layers\.0\..*"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "up_proj"], "layers_to_transform": [2]},
    ],
    ids=str,
)
def test_modules_are_targets_as_in_peft(options: dict[str, Any]) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists

    config = peft.LoraConfig(**options)
    names = [f"model.layers.{n}.{part}" for n in range(3) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.up")]
    want = [bool(check_target_module_exists(config, name)) for name in names]
    assert [is_target(options, name) for name in names] == want and True in want and False in want


def test_an_adapter_on_a_router_has_peft_s_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=["q_proj"], target_parameters=["gate.weight"]
    )
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert any("mlp.gate.lora_A" in name for name in stored)
    with pytest.raises(WeightsError, match=r"has an adapter on model.layers.0.mlp.gate; adapters are supported in"):
        planned(tmp_path / "base", tmp_path / "adapter")
    found = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert float((found - by_peft(tmp_path / "base", tmp_path / "adapter")).abs().max()) < 1e-5
