"""Models as `infer` opens them: on disk, in four bits, with adapters, from checkpoints; answers equal to transformers'
and PEFT's own.

Covers: megaswift/base/byte_size.py, megaswift/inference/options/placement.py,
megaswift/inference/model.py, megaswift/data/model_tokenizer.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.errors import ConfigError, UserError
from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator
from megaswift.inference.model import (
    load_config_tokenizer_and_processor,
    load_model_and_prompt_device,
)
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from tests.four_bits import BOTH_CPUS, by_transformers, cpu_with
from tests.inference.models import PROMPTS, adapters, opened, plain
from tests.trainers.inputs import write_model

pytestmark = pytest.mark.wide

NEW = 8


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return adapters(model.parent / "adapter", model)


def answers(generator: Generator) -> list[str]:
    prompts = [tuple(generator.tokenizer(t)["input_ids"]) for t in PROMPTS]
    return [c.text for c in generator.generate([AnswerRequest(p, NEW) for p in prompts], GenerationParams())]


def expected(model: Path, loaded: object = None) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(t)["input_ids"] for t in PROMPTS]
    return plain(loaded or AutoModelForCausalLM.from_pretrained(model), tokenizer, prompts, NEW, do_sample=False)


@pytest.mark.parametrize("option", ['{"rope_type": "linear", "factor": 4.0}', "linear"])
def test_rope_scaling_is_that_of_a_config_json_with_it(option: str, model: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(model, scaled)
    raw = json.loads((model / "config.json").read_text())
    raw["rope_parameters"] = {**raw["rope_parameters"], "rope_type": "linear", "factor": 4.0}
    (scaled / "config.json").write_text(json.dumps(raw))
    options = ModelLoadingOptions(model=str(model), rope_scaling=option)
    prepared = load_config_tokenizer_and_processor(options, None, 4 * raw["max_position_embeddings"])
    loaded, device = load_model_and_prompt_device(prepared, PlacementOptions())
    found = answers(Generator(loaded, prepared.tokenizer, device))
    assert found == expected(scaled) and found != expected(model)
    with pytest.raises(ConfigError, match="no --max_length from which it would follow"):
        load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(model), rope_scaling="linear"), None)


def test_new_special_tokens_must_be_in_the_tokenizer(model: Path) -> None:
    known = AutoTokenizer.from_pretrained(model).eos_token
    load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(model), new_special_tokens=(known,)), None)
    with pytest.raises(ConfigError, match="--new_special_tokens <new>: the tokenizer of --model"):
        load_config_tokenizer_and_processor(
            ModelLoadingOptions(model=str(model), new_special_tokens=(known, "<new>")), None
        )


def test_weights_on_disk_give_the_same_answers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, generator = opened(model, max_memory="cpu:80KiB", offload_folder=str(tmp_path / "off"))
    said = capsys.readouterr().err
    assert "model.layers.1-2" in said and "disk" in said
    where = {name: p.device.type for name, p in generator.model.named_parameters()}
    assert (
        where["lm_head.weight"] == where["model.layers.2.mlp.up_proj.weight"] == "meta"
        and where["model.embed_tokens.weight"] == "cpu"
    )
    assert answers(generator) == expected(model)


def test_a_file_s_map_goes_to_the_disk_too(model: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"": "cpu", "model.layers.0": "disk"}))
    _, generator = opened(model, device_map=str(tmp_path / "map.json"), offload_folder=str(tmp_path / "off"))
    assert generator.model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert answers(generator) == expected(model)


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_beside_and_in_the_weights(model: Path, adapter: Path, merge: bool) -> None:
    _, generator = opened(model, adapter, merge)
    assert any("lora_" in name for name, _ in generator.model.named_parameters()) != merge
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    want = expected(model, theirs)
    assert answers(generator) == want != expected(model)


def test_adapters_on_weights_on_disk(model: Path, adapter: Path, tmp_path: Path) -> None:
    _, generator = opened(model, adapter, max_memory="cpu:80KiB", offload_folder=str(tmp_path / "off"))
    assert any(p.device.type == "meta" for p in generator.model.parameters())
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    assert answers(generator) == expected(model, theirs)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 48}, "model.layers.0.mlp.down_proj has 32 outputs there and 48 in this model"),
        ({"layers": 1}, "it has model.layers.1.mlp.down_proj, but this model has 1 layer"),
    ],
)
def test_adapters_of_another_model_are_refused_before_weights_are_read(
    sizes: dict[str, int], words: str, model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in `Error(s) in loading state_dict for PeftModelForCausalLM:`; of too many layers nothing was said."""
    write_model(tmp_path / "other", **sizes)
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "other", adapter)
    (problem,) = caught.value.problems
    assert problem.rule == f"was trained on another model ({model}): {words}"
    assert problem.fix == f"use --model {model}, or adapters of {tmp_path / 'other'}"
    assert "device map" not in capsys.readouterr().err


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_training_answers_as_its_model_does(model: Path, tmp_path: Path, offload: bool) -> None:
    """Converted, as runs save them; tensors are read when transformers takes them, and written for the disk where they
    go there."""
    hf_to_megatron(model, tmp_path / "megatron")
    how = {"max_memory": "cpu:80KiB", "offload_folder": str(tmp_path / "off")} if offload else {}
    prepared, generator = opened(tmp_path / "megatron", **how)
    assert prepared.folder == tmp_path / "megatron" / "model"
    assert answers(generator) == expected(model)
    assert generator.own.eos_token_id == 1


@pytest.mark.parametrize(("bits", "avx512_bf16"), [(4, False), (4, True), (8, False)])
def test_quantized_as_bitsandbytes_does(model: Path, bits: int, avx512_bf16: bool) -> None:
    with cpu_with(avx512_bf16):
        _, generator = opened(model, quantization_bit=bits, device_map="cpu")
    kinds = {type(m).__name__ for m in generator.model.modules()}
    assert f"Linear{'4bit' if bits == 4 else '8bitLt'}" in kinds
    theirs = by_transformers(model, bits)
    prompt = generator.tokenizer(PROMPTS[2], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(generator.model(prompt).logits, theirs(prompt).logits)


@BOTH_CPUS
def test_adapters_beside_four_bits(model: Path, adapter: Path, avx512_bf16: bool) -> None:
    """`--quantization_bit 4 --adapters`: PEFT's own over bitsandbytes' weights."""
    with cpu_with(avx512_bf16):
        _, generator = opened(model, adapter, quantization_bit=4, device_map="cpu")
    base = by_transformers(model, 4)
    prompt = generator.tokenizer(PROMPTS[2], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        bare = base(prompt).logits
        theirs = peft.PeftModel.from_pretrained(base, adapter)(prompt).logits
        found = generator.model(prompt).logits
    assert torch.allclose(found, theirs, atol=1e-6) and not torch.allclose(found, bare, atol=1e-3)


def test_what_is_wrong_is_told_before_weights_are_read(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no device has room for \d+ modules?: .*\n.*--offload_folder DIR"):
        opened(model, max_memory="cpu:80KiB")
    with pytest.raises(UserError, match="places all layers on disk"):
        opened(model, max_memory="cpu:4KiB", offload_folder=str(tmp_path / "off"))
    (tmp_path / "config.json").write_text('{"model_type": "nosuch", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "code.py").write_text("raise SystemExit('ran code of the folder')\n")
    with pytest.raises(UserError, match="--trust_remote_code true"):
        load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(tmp_path)), None)
    with pytest.raises(UserError, match="no such folder"):
        load_config_tokenizer_and_processor(ModelLoadingOptions(model="/nowhere/model"), None)
