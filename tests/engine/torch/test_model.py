"""What trains on the torch engine: frozen weights by pattern, and those that train among them.

Covers: megaswift/engine/trainable_patterns.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megaswift.bridge.hf.source import HfSource
from megaswift.bridge.initial_weights import initial_lora_a
from megaswift.config import SwiftConfig
from megaswift.engine.torch.conversions import conversion_groups, unused_weights
from megaswift.engine.torch.model import add_peft, attention_to_load_with, build_model, freeze_parts
from megaswift.errors import ConfigError, WeightsError
from megaswift.families import load_spec
from megaswift.models.heads import with_scalar_head
from megaswift.models.options.model import ModelConfig
from megaswift.run.engines import model_build
from tests.parity.models import VOCAB, build
from tests.parity.vision import KINDS, tokenizer


def text_model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=1, num_key_value_heads=1, **sizes))


def trains(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_weights_that_train_among_frozen_ones() -> None:
    model = text_model()
    freeze_parts(model, ModelConfig(freeze_parameters=(".",), trainable_parameters=(r"layers\.1\.mlp", "lm_head")))
    names = {f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert trains(model) == names | {"lm_head.weight"}


def test_a_frozen_tower_gives_way_to_what_is_to_train() -> None:
    model = KINDS["llava"](tokenizer("llava"))[0]
    pattern = r"multi_modal_projector\.linear_1"
    freeze_parts(model, ModelConfig(freeze_llm=True, trainable_parameters=(pattern,)))
    assert trains(model) == {n for n, _ in model.named_parameters() if re.search(pattern, n)} != set()


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("gemma2", {"attn_impl": "sdpa"}, "eager"),
        ("gpt_oss", {"attn_impl": "sdpa"}, "eager"),
        ("gemma2", {"attn_impl": "sdpa", "torch_compile": True}, "sdpa"),
        ("gemma2", {"attn_impl": "auto"}, None),
        ("qwen3", {"attn_impl": "sdpa"}, "sdpa"),
    ],
)
def test_attention_to_load_with(kind: str, options: dict[str, Any], name: str | None) -> None:
    """Only what this engine replaces afterwards is loaded with another than was asked for."""
    assert attention_to_load_with(ModelConfig(**options), {"model_type": kind}) == name


def changed_folder(folder: Path, more: dict[str, Any]) -> Path:
    """A model folder with these fields in its config.json."""
    path = build("dense", folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


@pytest.mark.parametrize("weights", [True, False])
def test_outputs_have_names_whatever_the_folder_says(weights: bool, tmp_path: Path) -> None:
    folder = changed_folder(tmp_path, {"return_dict": False})
    cfg = SwiftConfig(engine="ddp", model=str(folder))
    model: Any = build_model(folder, cfg.model, cfg.train.seed, weights, load_spec(folder), {}, False)
    ids = torch.arange(4)[None]
    assert model(ids).logits.shape == (1, 4, VOCAB) and model.base_model(ids).last_hidden_state.shape[:2] == (1, 4)


def test_a_field_of_another_type_is_one_line(tmp_path: Path) -> None:
    """transformers' configuration class raises an error that is no ValueError."""
    spec = load_spec(build("dense", tmp_path))
    folder = changed_folder(tmp_path, {"hidden_size": "64"})
    with pytest.raises(WeightsError, match="transformers cannot load it: .*'hidden_size': TypeError: .* expected int"):
        build_model(folder, SwiftConfig(engine="ddp", model=str(folder)).model, 0, True, spec, {}, False)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="--trainable_parameters nothing: matches no weight; names are like model"):
        freeze_parts(text_model(), ModelConfig(freeze_parameters=("mlp",), trainable_parameters=("nothing",)))
    with pytest.raises(ConfigError, match="freezes all weights: nothing would be trained"):
        freeze_parts(text_model(), ModelConfig(freeze_parameters=("weight",)))


def test_weights_that_the_files_lack_or_that_have_other_shapes(tmp_path: Path) -> None:
    """transformers initializes both at random. A reward model's new head is the only weight that may be missing."""
    folder = build("dense", tmp_path / "model")
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    for path in folder.glob("*.safetensors"):
        stored = {name: t for name, t in load_file(path).items() if name != up}
        stored |= {gate: stored[gate][:-1].contiguous()} if gate in stored else {}
        save_file(stored, path, metadata={"format": "pt"})
    for spec in (load_spec(folder), with_scalar_head(load_spec(folder))):
        with pytest.raises(WeightsError) as caught:
            build_model(folder, SwiftConfig(engine="ddp", model=str(folder)).model, 0, True, spec, {}, False)
        assert [p.what for p in caught.value.problems] == [f"--model {folder}, tensor {gate}", f"--model {folder}"]
        assert caught.value.problems[1].rule == f"transformers finds no weights for {up}"


def test_tensors_that_the_model_does_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told of by their names, on both ways of loading. Not what the model's class says to ignore, such as buffers of
    older files, nor the output layer of a model that gets a score."""
    folder = build("dense", tmp_path / "model")
    extra = {
        "model.layers.1.mlp.extra.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    path = next(folder.glob("*.safetensors"))
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        table = json.loads(index.read_text())
        index.write_text(json.dumps(table | {"weight_map": table["weight_map"] | dict.fromkeys(extra, path.name)}))
    cfg, spec = SwiftConfig(engine="ddp", model=str(folder)), load_spec(folder)
    for one in (spec, with_scalar_head(spec)):
        build_model(folder, cfg.model, cfg.train.seed, True, one, {}, False)
        said = capsys.readouterr().err
        assert said.count("1 tensor of its files, not used by this model, will not be exported: model.layers.1") == 1
        assert "LOAD REPORT" not in said
    source = HfSource(folder)
    bare = build_model(folder, cfg.model, cfg.train.seed, True, spec, {}, False)
    assert unused_weights(bare, source, conversion_groups(bare, source)) == {"model.layers.1.mlp.extra.weight"}


def test_adapters_that_lack_a_tensor(tmp_path: Path) -> None:
    """PEFT would go on with a B of zeros."""
    options: dict[str, Any] = {"engine": "ddp", "model": "m", "train_type": "lora"}
    cfg = SwiftConfig(**options)
    adapted: Any = add_peft(text_model(), model_build(cfg))
    adapted.save_pretrained(str(tmp_path))
    cfg = SwiftConfig(**options, adapters=str(tmp_path))
    assert isinstance(add_peft(text_model(), model_build(cfg)), type(adapted))
    path = tmp_path / "adapter_model.safetensors"
    [*kept, (lost, _)] = sorted(load_file(path).items())
    save_file(dict(kept), path)
    with pytest.raises(WeightsError, match=re.escape(f"{tmp_path}, tensor {lost}: is missing")):
        add_peft(text_model(), model_build(cfg))


def test_new_adapters_have_the_native_engine_s_numbers() -> None:
    """A by seed and name, whatever comes before it; B of zeros. PEFT's own ways of starting stay PEFT's."""
    drawn: dict[str, dict[str, torch.Tensor]] = {}
    runs: dict[str, dict[str, Any]] = {
        "all": {},
        "one": {"target_modules": ("q_proj",)},
        "seed": {"seed": 8},
        "other": {"init_weights": "gaussian"},
    }
    for name, changes in runs.items():
        cfg = SwiftConfig(**{"engine": "ddp", "model": "m", "train_type": "lora", **changes})
        halves = {
            n: p.detach() for n, p in add_peft(text_model(), model_build(cfg)).named_parameters() if ".lora_" in n
        }
        drawn[name] = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in halves.items()}
    for name, p in drawn["all"].items():
        want = initial_lora_a(name, tuple(p.shape), SwiftConfig().train.seed) if ".lora_A." in name else 0 * p
        assert torch.equal(p, want)
        assert name not in drawn["one"] or torch.equal(p, drawn["one"][name])
        assert ".lora_B." in name or not torch.equal(p, drawn["seed"][name])
    assert 0 < len(drawn["one"]) < len(drawn["all"])
    a = next(name for name in drawn["all"] if ".lora_A." in name)
    assert not torch.equal(drawn["other"][a], drawn["all"][a])
