"""Runs that train layers for multi-token prediction, as users start them, and what they leave.

Covers: megaswift/run/checks/model_spec.py, megaswift/bridge/hf/export.py, megaswift/bridge/checkpoint/hf_view.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from megaswift.bridge import HfSource, WeightPlan
from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.config import load_config
from megaswift.errors import ConfigError, WeightsError
from megaswift.families import family_of
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.models import build
from tests.parity.mtp import drawn_layers, heads, heads_by_disk_name
from tests.trainers.inputs import write_conversations, write_model
from tests.trainers.runs import run
from tests.trainers.test_vision_language_run import documents
from tests.vision_language_folders import with_stacked_experts, write_vision_language

COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
LAYER = "model.layers.4."


def model(folder: Path, variant: str = "glm4_moe-mtp") -> Path:
    """A tiny model with such layers and a character tokenizer."""
    write_model(folder)
    for old in (*folder.glob("*.safetensors"), folder / "config.json"):
        old.unlink()
    return build(variant, folder)


def trained(folder: Path, *options: object, ranks: int = 1, source: Path | None = None, count: int = 3) -> Path:
    """The output directory of a few steps, exported."""
    folder.mkdir(exist_ok=True)
    source = source or model(folder / "model")
    data = write_conversations(folder / "data.jsonl", 24)
    inputs = ["--model", str(source), "--dataset", str(data), "--dataset_cache_dir", str(folder / "cache")]
    batch = ("--per_device_train_batch_size", 4, "--lr", 1e-2, "--report_to", "none")
    steps = ("--max_steps", count, "--save_steps", count, "--export_hf", "true", "--engine", "megatron")
    batch += () if "--global_batch_size" in options else ("--global_batch_size", 8)
    run(inputs, folder / "out", *batch, *steps, *options, ranks=ranks)
    return folder / "out"


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_trained_layers_are_exported(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the folder's own names, copies of embedding and head included; transformers' own loader reads them, and
    the checkpoint converts to the same tensors."""
    out = trained(tmp_path, "--mtp_num_layers", 1, *(("--pp", 2) if ranks == 2 else ()), ranks=ranks)
    had, has = stored(tmp_path / "model"), stored(out / "hf")
    assert had.keys() == has.keys()
    assert [n for n in had if torch.equal(had[n], has[n]) and not n.endswith("e_score_correction_bias")] == []
    assert all(torch.equal(has[LAYER + copy], has[name]) for copy, name in COPIES.items())
    lines = [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    assert all(0 < line["mtp_1_loss"] < 10 for line in lines)

    # transformers looks for layers of the published sizes' numbers
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\..*"])
    whole: Any = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    ahead: Any = MtpModel.from_pretrained(whole)
    read = dict(heads_by_disk_name(ahead, whole.config, lambda p: p))
    assert read.keys() == {n for n in has if n.startswith(LAYER)} - {LAYER + copy for copy in COPIES}
    assert all(torch.equal(tensor, has[name]) for name, tensor in read.items())

    megatron_to_hf(out / "checkpoints" / "step-3", tmp_path / "converted")
    converted = stored(tmp_path / "converted")
    assert converted.keys() == has.keys() and all(torch.equal(converted[name], has[name]) for name in has)


@pytest.mark.process
def test_layers_that_do_not_train_stay(tmp_path: Path) -> None:
    """Without the option they are carried bit for bit; the checkpoint can still be the start of a run that trains
    them."""
    out = trained(tmp_path / "a")
    had, has = stored(tmp_path / "a" / "model"), stored(out / "hf")
    assert had.keys() == has.keys()
    same = {n for n in had if torch.equal(had[n], has[n]) and not n.endswith("e_score_correction_bias")}
    assert same == {n for n in had if n.startswith(LAYER) and not n.endswith("e_score_correction_bias")}
    further = trained(tmp_path / "b", "--mtp_num_layers", 1, source=out / "checkpoints" / "step-3")
    moved = stored(further / "hf")
    joined = f"{LAYER}eh_proj.weight"
    assert moved.keys() == had.keys() and not torch.equal(moved[joined], had[joined])


@pytest.mark.process
def test_only_the_layers_train(tmp_path: Path) -> None:
    """All else is frozen, also behind recomputed layers; a router's bias on the choice of experts never trains."""
    frozen = ("--freeze_parameters", ".", "--trainable_parameters", r"layers\.4\.", "--recompute_granularity", "full")
    out = trained(tmp_path, "--mtp_num_layers", 1, *frozen)
    had, has = stored(tmp_path / "model"), stored(out / "hf")
    moved = {name for name in had if not torch.equal(had[name], has[name])}
    still = {LAYER + name for name in (*COPIES, "mlp.gate.e_score_correction_bias")}
    assert moved == {name for name in had if name.startswith(LAYER)} - still


@pytest.mark.process
def test_the_loss_ahead_falls(tmp_path: Path) -> None:
    """From random weights too; the reported loss is the decoder's alone, which transformers computes."""
    folder = model(tmp_path / "model", "qwen3_5-mtp")
    config = json.loads((folder / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    options = ("--mtp_num_layers", 1, "--random_init", "true", "--mtp_loss_scaling_factor", 0.5)
    lines = [
        line
        for line in read_lines(trained(tmp_path, *options, source=folder, count=24) / "metrics.jsonl")
        if "loss" in line
    ]
    assert lines[-1]["mtp_1_loss"] < lines[0]["mtp_1_loss"] - 0.3
    assert "mtp_1" not in lines[0]


@torch.no_grad()
def loss_ahead(folder: Path, data: Path) -> float:
    """The first layer's mean over the assistant's tokens, each document apart, by transformers' whole model."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ahead = heads(whole, None, 1)
    read = stored(folder)
    if any("gate_up_proj" in name for name in read if name.startswith("mtp.")):
        read |= split_experts({n: t for n, t in read.items() if n.startswith("mtp.") and ".experts." in n})
    for name, tensor in heads_by_disk_name(ahead, whole.config, lambda p: p):
        tensor.copy_(read[name])
    total, count = 0.0, 0
    for ids, said in documents(data):
        hidden = whole.get_decoder()(input_ids=ids[None], use_cache=False)[0][:, :-2]
        positions = torch.arange(hidden.shape[1])[None]
        logits = whole.lm_head(ahead.forward_layer(0, hidden, positions, None, input_ids=ids[None, 1:-1]))
        logprobs = logits[0].log_softmax(-1).gather(1, ids[2:, None])
        total -= float(logprobs[said[2:]].sum())
        count += int(said[2:].sum())
    return total / count


def split_experts(stacks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of each expert."""
    found = {}
    for name, stack in stacks.items():
        home, _, kind = name.rpartition(".")
        for e, both in enumerate(stack):
            parts = {"down": both} if kind == "down_proj" else dict(zip(("gate", "up"), both.chunk(2), strict=True))
            found |= {f"{home}.{e}.{part}_proj.weight": matrix for part, matrix in parts.items()}
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("stacked", "ranks"),
    [
        (False, 1),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(False, 2, marks=pytest.mark.slow),
    ],
)
def test_layers_of_a_published_folder(stacked: bool, ranks: int, tmp_path: Path) -> None:
    """A vision-language folder whose decoder has stacked experts; those of the layers ahead are stored one by one, as
    published, or stacked too."""
    folder = write_vision_language(tmp_path / "model", "qwen3_5_moe", stacked=True, mtp_num_hidden_layers=1)
    (path,) = folder.glob("*.safetensors")
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith("mtp.")}
    layers = drawn_layers(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), 1)
    save_file(tensors | (with_stacked_experts(layers) if stacked else layers), path, {"format": "pt"})
    options = ("--mtp_num_layers", 1, "--global_batch_size", 24, *(("--pp", 2) if ranks == 2 else ()))
    out = trained(tmp_path, *options, source=folder, ranks=ranks, count=1)
    (line,) = [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    assert line["mtp_1_loss"] == pytest.approx(loss_ahead(folder, tmp_path), rel=2e-6)
    had, has = stored(folder), stored(out / "hf")
    assert had.keys() == has.keys()
    assert {n for n in had if torch.equal(had[n], has[n])} == {n for n in had if n.startswith("model.visual.")}
    assert loss_ahead(out / "hf", tmp_path) < line["mtp_1_loss"] - 0.05


def test_names_of_the_oracle(tmp_path: Path) -> None:
    """The folder of the tests has every parameter of transformers' layers once."""
    folder = build("deepseek_v3-mtp", tmp_path / "m")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [name for name, _ in heads_by_disk_name(heads(whole, folder, 2), whole.config, lambda p: p)]
    assert len(names) == len({*names}) and {*names} < stored(folder).keys()


@pytest.mark.parametrize(
    ("variant", "layers", "says"),
    [
        ("dense", 1, "qwen3 has no layers for multi-token prediction that can be trained; deepseek_v3, glm4_moe,"),
        ("deepseek_v3-mtp", 1, "config.json says that the model has 2 such layers (num_nextn_predict_layers or"),
        ("qwen3_5", 1, "config.json says that the model has 0 such layers (mtp_num_hidden_layers)"),
    ],
)
def test_a_number_that_is_not_the_models(variant: str, layers: int, says: str, tmp_path: Path) -> None:
    folder = build(variant, tmp_path / variant)
    config = json.loads((folder / "config.json").read_text())
    if variant == "qwen3_5":
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match=re.escape(says)):
        model_spec_for_task(load_config("sft", ["--model", str(folder), "--mtp_num_layers", str(layers)]), folder)


def test_a_folder_without_the_layers(tmp_path: Path) -> None:
    """As transformers saves it: its config.json still says that it has them."""
    folder = build("glm4_moe", tmp_path / "m")
    cfg = load_config("sft", ["--model", str(folder), "--mtp_num_layers", "1"])
    spec = model_spec_for_task(cfg, folder)
    with pytest.raises(WeightsError, match=r"enorm.weight.*is missing[\s\S]*leave out --mtp_num_layers"):
        WeightPlan(family_of(spec.hf_config), spec).check(HfSource(folder))
