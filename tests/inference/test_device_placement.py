"""Device maps: what accelerate decides, what a user's file may say, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megaswift.errors import ConfigError
from megaswift.inference.device_placement import (
    ModuleSizes,
    decide_device_map,
    execution_device,
    expand_user_device_map,
    placement_table,
    quantized_checkpoint_bits,
)

FLAG = "--device_map map.json"


@pytest.fixture(scope="module")
def model() -> Any:
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=12,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def refused(model: Any, given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        expand_user_device_map(ModuleSizes(model), given, FLAG)
    return str(caught.value)


def test_a_file_s_map_names_every_module_once(model: Any) -> None:
    given = {"": "cpu", "model.layers.1": "disk", "model.layers.10": "disk"}
    full = expand_user_device_map(ModuleSizes(model), given, FLAG)
    assert (
        full["model.layers.1"] == full["model.layers.10"] == "disk"
        and full["model.layers.11"] == full["lm_head"] == "cpu"
    )
    names = [n for n, _ in model.named_parameters()]
    assert all(sum(n == m or n.startswith(m + ".") for m in full) == 1 for n in names)


def test_mistakes_in_a_file_s_map(model: Any) -> None:
    text = refused(model, {"model.embed_token": "cpu", "lm_head": "cpu"})
    assert "model.embed_token: is not a module of this model" in text and "did you mean model.embed_tokens?" in text
    text = refused(model, {"model.layers": "cpu", "lm_head": "cpu"})
    assert "leaves out model.embed_tokens, model.norm" in text
    assert "leaves out lm_head" in refused(model, {"model": "cpu"})
    whole = {"": "cpu", "model.layers.3.mlp": "disk"}
    assert "model.layers.3: is spread over cpu, disk" in refused(model, whole)
    if not torch.cuda.is_available():
        assert "GPU 1: this machine has no GPU" in refused(model, {"": "cpu", "model.layers.3": 1})


def test_what_does_not_fit_goes_to_the_disk(model: Any) -> None:
    sizes = ModuleSizes(model)
    total = sum(b for _, _, b in sizes.weights())
    assert decide_device_map(sizes, "auto", {"cpu": int(total * 10)}) == {"": "cpu"}
    placed = decide_device_map(sizes, "sequential", {"cpu": int(total / 2)})
    on_disk = [n for n, d in placed.items() if d == "disk"]
    held = sum(b for name, _, b in sizes.weights() if not any(name.startswith(n + ".") for n in on_disk))
    assert on_disk and 0 < held < total / 2
    # in four bits the same model fits where it did not before: only the embedding and the head keep their size
    small = sum(b for _, _, b in ModuleSizes(model, 4).weights())
    assert small < total / 3 and decide_device_map(ModuleSizes(model, 4), "sequential", {"cpu": int(total / 2)}) == {
        "": "cpu"
    }


@pytest.mark.parametrize("how", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_two_gpus_are_shared_as_accelerate_shares_them(how: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision alone: devices are numbers in it. As transformers' `from_pretrained(device_map=how)` would place the
    model."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = ModuleSizes(model)
    total = sum(b for _, _, b in sizes.weights())
    placed = decide_device_map(sizes, how, {0: int(total * 0.8), 1: int(total * 1.2), "cpu": int(total)})
    held = {gpu: 0.0 for gpu in (0, 1)}
    for name, _, size in sizes.weights():
        held[placed[max((m for m in placed if not m or f"{name}.".startswith(f"{m}.")), key=len)]] += size
    assert sum(held.values()) == pytest.approx(total)
    if how == "balanced_low_0":
        assert held[0] < held[1] / 2
    elif how == "sequential":
        assert held[0] > 0.6 * total
    else:
        assert max(held.values()) < 0.65 * total


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, 8),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_bits_of_a_quantized_checkpoint(stored: dict[str, Any] | None, bits: int | None) -> None:
    config = Qwen3Config(**({} if stored is None else {"quantization_config": stored}))
    assert quantized_checkpoint_bits(config) == bits


def test_the_table_joins_layers_and_adds_up(model: Any) -> None:
    given = {"": "cpu"} | {f"model.layers.{i}": "disk" for i in range(4, 12)}
    placed = expand_user_device_map(ModuleSizes(model), given, FLAG)
    lines = [line.split() for line in placement_table(ModuleSizes(model), placed).splitlines()]
    assert lines[0] == ["module", "device", "parameters", "bytes"]
    rows = {line[0]: line for line in lines[1:]}
    assert {"model.embed_tokens", "model.layers.0-3", "model.layers.4-11", "lm_head"} <= rows.keys()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert rows["model.layers.4-11"][1:3] == ["disk", f"{8 * layer:,}"]
    sums = {line[2]: int(line[3].replace(",", "")) for line in lines if line[:2] == ["in", "all"]}
    assert sums["disk"] == 8 * layer
    assert sum(sums.values()) == sum(t.numel() for t in [*model.parameters(), *model.buffers()])


def test_prompts_go_where_layers_are_computed() -> None:
    assert execution_device({"a": "disk", "b": "cpu"}) == torch.device("cpu")
    assert execution_device({"a": "cpu", "b": 1}) == torch.device("cuda:1")


def test_one_device_is_one_row(model: Any, tmp_path: Path) -> None:
    assert placement_table(ModuleSizes(model), {"": "cpu"}).splitlines()[1].startswith("(the whole model)  cpu")
