"""`megaswift export`: merged as PEFT merges, quantized as transformers saves it; nothing is overwritten.

Covers: megaswift/export.py.
"""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from megaswift.errors import ConfigError
from megaswift.export import main
from tests.four_bits import by_transformers, cpu_with
from tests.inference.models import adapters

pytestmark = pytest.mark.wide

IDS = torch.arange(4, 40)[None]


def logits(loaded: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return loaded.eval()(IDS).logits


def test_merged_as_peft_merges(model: Path, tmp_path: Path) -> None:
    adapter = adapters(tmp_path / "adapter", model)
    out = tmp_path / "merged"
    assert (
        main(["--model", str(model), "--adapters", str(adapter), "--merge_lora", "true", "--output_dir", str(out)]) == 0
    )
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    want, found = logits(theirs), logits(AutoModelForCausalLM.from_pretrained(out))
    assert float((want - found).abs().max()) < 1e-5 * max(1.0, float(want.abs().max()))
    with pytest.raises(ConfigError, match="exists"):
        main(["--model", str(model), "--adapters", str(adapter), "--merge_lora", "true", "--output_dir", str(out)])


@pytest.mark.parametrize(("bits", "avx512_bf16"), [(4, False), (4, True), (8, False)])
def test_quantized_as_transformers_quantizes(model: Path, tmp_path: Path, bits: int, avx512_bf16: bool) -> None:
    out = tmp_path / "small"
    with cpu_with(avx512_bf16):
        assert main(["--model", str(model), "--quantization_bit", str(bits), "--output_dir", str(out)]) == 0
    assert torch.equal(logits(by_transformers(out)), logits(by_transformers(model, bits)))
    sizes = [sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in (out, model)]
    assert sizes[0] < 0.6 * sizes[1] and (out / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".small*"))


def test_bitsandbytes_other_data_type_and_quantized_scales(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    words = "--quant_method bnb --quant_bits 4 --bnb_4bit_quant_type fp4 --bnb_4bit_use_double_quant true"
    assert main(["--model", str(model), *words.split(), "--output_dir", str(out)]) == 0
    how = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(load_in_4bit=True, **how)
    with cpu_with(avx512_bf16=False):
        theirs = AutoModelForCausalLM.from_pretrained(model, device_map="cpu", quantization_config=config)
    found = logits(by_transformers(out))
    assert torch.equal(found, logits(theirs)) and not torch.equal(found, logits(by_transformers(model, 4)))


def test_merged_and_quantized_is_one_after_the_other(model: Path, tmp_path: Path) -> None:
    source = ["--model", str(model), "--adapters", str(adapters(tmp_path / "adapter", model)), "--merge_lora"]
    assert main([*source, "--output_dir", str(tmp_path / "merged")]) == 0
    assert main(["--model", str(tmp_path / "merged"), "--quant", "4", "--output_dir", str(tmp_path / "two")]) == 0
    assert main([*source, "--quant", "4", "--output_dir", str(tmp_path / "one")]) == 0
    one, two = (by_transformers(tmp_path / name) for name in ("one", "two"))
    assert torch.equal(logits(one), logits(two))
    assert {p.name for p in tmp_path.iterdir()} == {"adapter", "merged", "one", "two"}


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="needs adapters"):
        main(["--model", "x", "--merge_lora", "true", "--quantization_bit", "4"])
    with pytest.raises(ConfigError, match="merge_adapters true: is not an option .*\n.*--merge_lora true"):
        main(["--model", "x", "--merge_adapters", "true", "--output_dir", "y"])
    with pytest.raises(ConfigError, match="--quantization_bit, --quant_method, --to_mcore, --to_hf or --push_to_hub"):
        main(["--model", "x", "--output_dir", "y"])


@pytest.mark.parametrize("inner", ["", "adapter"])
def test_the_folder_of_a_lora_run_as_the_model_is_told_as_infer_tells_it(inner: str, tmp_path: Path) -> None:
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/models/base"}')
    with pytest.raises(ConfigError) as caught:
        main(["--model", str(tmp_path), "--merge_lora", "true", "--output_dir", "y"])
    (problem,) = caught.value.problems
    assert problem.rule == "contains LoRA adapters, not a model"
    assert problem.fix == f"--model /models/base --adapters {folder} --merge_lora true"
