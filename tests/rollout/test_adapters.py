"""The sampler in this process with adapters that come alone, against PEFT's own model and the merged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megaswift.errors import ConfigError, WeightsError
from megaswift.rollout.backends import transformers_sampler
from megaswift.rollout.backends.transformers_sampler import TransformersSampler, build
from megaswift.rollout.sampler import SamplerOptions, SamplingParams, make_sampler
from tests.inference.models import adapters
from tests.rollout.test_transformers import NEW, PROMPTS, STOPS, filled, gap, greedy, weights

pytestmark = pytest.mark.wide
GREEDY = SamplingParams(NEW, temperature=0, stop_token_ids=STOPS)
DRAWN = SamplingParams(NEW, temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def two(model: Path) -> list[Path]:
    return [adapters(model.parent / str(seed), model, seed) for seed in (5, 6)]


def theirs(model: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()


def alone(model: Path, **options: Any) -> TransformersSampler:
    return build(model, SamplerOptions(lora_rank=4, **options))


def test_completions_are_those_of_peft(model: Path, two: list[Path]) -> None:
    """Tokens and log-probabilities by each of two adapters in turn; nothing but they ever come."""
    made, seen = alone(model), []
    for adapter in (*two, two[0]):
        made.update_adapter(adapter)
        found, wanted = made.generate(PROMPTS, GREEDY, range(6)), theirs(model, adapter)
        assert [list(c.token_ids) for c in found] == [greedy(wanted, p) for p in PROMPTS]
        drawn = made.generate(PROMPTS, DRAWN, range(6))
        assert gap(wanted, PROMPTS, found) < 2e-6 and gap(wanted, PROMPTS, drawn, 0.8) < 5e-6
        seen.append((found, drawn))
    assert seen[0] == seen[2] != seen[1]


def test_merged_weights_make_the_same_completions(model: Path, two: list[Path]) -> None:
    merged = theirs(model, two[0]).merge_and_unload().state_dict()
    whole, made = build(model, SamplerOptions()), alone(model)
    whole.update_weights(merged.items())
    made.update_adapter(two[0])
    for a, b in zip(made.generate(PROMPTS, DRAWN, range(6)), whole.generate(PROMPTS, DRAWN, range(6)), strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    plain = filled(model).generate(PROMPTS, DRAWN, range(6))
    assert [c.token_ids for c in plain] != [c.token_ids for c in made.generate(PROMPTS, DRAWN, range(6))]


def test_weights_stay_as_they_are_in_the_files(model: Path, two: list[Path]) -> None:
    made, stored = alone(model), dict(weights(model))
    for adapter in (*two, *two):
        made.update_adapter(adapter)
        made.generate(PROMPTS, DRAWN, range(6))
    held = {name.replace(".base_layer", ""): p for name, p in made.model.named_parameters() if ".lora_" not in name}
    assert held.keys() == stored.keys() and all(torch.equal(held[name], stored[name]) for name in stored)
    assert not any(p.requires_grad for p in made.model.parameters())


def test_sleep_gives_all_memory_back_and_adapters_wake(model: Path, two: list[Path]) -> None:
    made = alone(model, dtype="float64")
    made.update_adapter(two[1])
    before = made.generate(PROMPTS, DRAWN, range(6))
    made.sleep()
    assert all(p.untyped_storage().nbytes() == 8 for p in made.model.parameters())
    with pytest.raises(AssertionError):
        made.generate(PROMPTS, DRAWN, range(6))
    made.update_adapter(two[1])
    assert made.generate(PROMPTS, DRAWN, range(6)) == before


def test_the_global_generator_is_left_alone(model: Path, two: list[Path]) -> None:
    """PEFT draws numbers for new layers; a run that goes on makes them at another time than the run that went
    through."""
    made, before = alone(model), torch.get_rng_state()
    made.update_adapter(two[0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("change", ["lack", "have additional"])
def test_adapters_of_another_model_are_named(change: str, model: Path, two: list[Path], tmp_path: Path) -> None:
    tensors = load_file(two[0] / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    tensor = tensors.pop(name)
    if change != "lack":
        tensors |= {name: tensor, name.replace("layers.1", "layers.9"): tensor.clone()}
    (tmp_path / "adapter_config.json").write_text((two[0] / "adapter_config.json").read_text())
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    made = alone(model)
    with pytest.raises(
        WeightsError, match=rf"{change}.*adapters: .*layers.\d.mlp.up_proj.lora_A.weight\n.*--rollout_lora false"
    ):
        made.update_adapter(tmp_path)
    with pytest.raises(AssertionError):
        made.generate(PROMPTS, GREEDY, range(6))


def test_without_peft_adapters_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_sampler.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="require the package peft\n    try: run pip install peft"):
        make_sampler("transformers", model, SamplerOptions(lora_rank=4))
    assert isinstance(make_sampler("transformers", model, SamplerOptions()), TransformersSampler)
