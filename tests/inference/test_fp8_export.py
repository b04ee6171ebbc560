"""`megaswift export --quant_method fp8`: transformers' own bits, read back by transformers and by megaswift.

Covers: megaswift/inference/fp8_export.py, megaswift/inference/options/export.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from megaswift.bridge.hf.source import HfSource
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import ConfigError, UserError
from megaswift.export import main
from megaswift.inference import fp8_export
from megaswift.inference.fp8_export import choose_fp8_weights
from tests.trainers.inputs import write_model

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 64, "num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}


def written(kind: str, path: Path, **sizes: Any) -> Path:
    """A model of this kind in a folder with a tokenizer."""
    import transformers

    write_model(path, layers=1)
    for name in ("model.safetensors", "config.json"):
        (path / name).unlink()
    options = {**SIZES, "num_key_value_heads": 2, "vocab_size": 512, **KINDS.get(kind, {}), **sizes}
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return path


def by_transformers(weight: Tensor) -> tuple[Tensor, Tensor]:
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"w.weight": weight})
    return made["w.weight"], made["w.weight_scale_inv"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_has_transformers_bits_and_both_read_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_export, "BLOCK", 128 * 256 * 4)  # several bands of a matrix
    folder, out = written(kind, tmp_path / "model"), tmp_path / "small"
    assert main(["--model", str(folder), "--quant_method", "fp8", "--output_dir", str(out)]) == 0
    source, stored, ours = HfSource(folder), HfSource(out), open_weights(out)
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = section.pop("modules_to_not_convert")
    gates = [f"model.layers.{i}.mlp.shared_expert_gate" for i in (0, 1)] if kind == "Qwen2Moe" else []
    assert kept == sorted(["lm_head", *gates])
    assert section == {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantized = {name for name in stored.names() if stored.dtype_name(name) == "F8_E4M3"}
    assert quantized == {n for n in source.names() if n.endswith("_proj.weight")} and quantized
    reference = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    read = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    for name in source.names():
        weight = source.slice(name)
        if name not in quantized:
            assert torch.equal(stored.slice(name), weight), name
            continue
        values, scales = by_transformers(weight)
        assert torch.equal(stored.slice(name).view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(stored.slice(name + "_scale_inv"), scales), name
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(ours.slice(name).float(), (values.float() * wide).to(torch.bfloat16).float()), name
        assert float((ours.slice(name).float() - weight.float()).abs().max()) <= float(weight.abs().max()) / 16
        if name in read:
            assert torch.equal(read[name].float(), ours.slice(name).float()), name
    assert read.keys() == reference.keys()
    assert all(float((read[n].float() - w).abs().max()) <= float(w.abs().max()) / 16 for n, w in reference.items())
    assert (out / "tokenizer.json").is_file()


def test_matrices_of_partial_blocks_and_their_partners_are_kept(tmp_path: Path) -> None:
    folder, out = written("Qwen3", tmp_path / "model", head_dim=32, num_key_value_heads=2), tmp_path / "small"
    assert main(["--model", str(folder), "--quant_method", "fp8", "--output_dir", str(out)]) == 0
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    attention = {f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qkv"}
    assert {*kept} == {"lm_head", *attention}  # keys and values have 64 rows; vLLM joins them to the queries
    assert HfSource(out).dtype_name("model.layers.0.self_attn.o_proj.weight") == "F8_E4M3"
    read = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(
        read.model.layers[0].self_attn.k_proj.weight, HfSource(folder).slice("model.layers.0.self_attn.k_proj.weight")
    )


def test_merged_adapters_are_quantized(tmp_path: Path) -> None:
    from tests.inference.models import adapters

    folder = written("Qwen2", tmp_path / "model")
    adapter = adapters(tmp_path / "adapter", folder)
    words = ["--model", str(folder), "--adapters", str(adapter), "--merge_lora", "true"]
    assert main([*words, "--output_dir", str(tmp_path / "merged")]) == 0
    assert main([*words, "--quant_method", "fp8", "--output_dir", str(tmp_path / "both")]) == 0
    merged, both = HfSource(tmp_path / "merged"), HfSource(tmp_path / "both")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(both.slice(name).float(), by_transformers(merged.slice(name))[0].float())


def test_a_vision_encoder_keeps_its_dtype() -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**sizes, vocab_size=128))
    )
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    disk = {n.replace("model.language_model.", "language_model.model."): s for n, s in shapes.items()}
    source: Any = SimpleNamespace(names=lambda: [*disk, *shapes], shape=lambda n: (disk | shapes)[n])
    quantized, kept = choose_fp8_weights(model, source)
    assert quantized and all("language_model" in n and n.endswith("_proj.weight") for n in quantized)
    assert any("vision_tower" in n for n in kept) and "model.multi_modal_projector.linear_1" in kept


def test_models_that_cannot_be(tmp_path: Path) -> None:
    small = tmp_path / "small"
    write_model(small, layers=1)
    out = ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(UserError, match="multiples of 128"):
        main(["--model", str(small), "--quant_method", "fp8", *out])
    folder = written("Qwen2", tmp_path / "model")
    assert main(["--model", str(folder), "--quant_method", "fp8", *out]) == 0
    with pytest.raises(ConfigError, match="already quantized"):
        main(["--model", str(tmp_path / "out"), "--quant_method", "fp8", "--output_dir", str(tmp_path / "again")])
    with pytest.raises(ConfigError, match="applies only to --quantization_bit 4"):
        words = ["--bnb_4bit_quant_type", "fp4", "--output_dir", str(tmp_path / "b")]
        main(["--model", str(folder), "--quant_method", "fp8", *words])
