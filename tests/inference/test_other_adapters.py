"""Adapters other than LoRA in answers: beside the weights, in them, over four bits; and their merge by `megaswift
export`.

Covers: megaswift/bridge/adapters/peft_merge.py, megaswift/bridge/hf/model_folder.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megaswift.cli import main
from megaswift.errors import UserError
from megaswift.inference.model import load_config_tokenizer_and_processor
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.models import quantized_training
from tests.bridge.folders import set_config
from tests.inference.models import folder, opened
from tests.inference.test_model import answers, expected

pytestmark = pytest.mark.wide

CONFIGS: dict[str, Any] = {
    "vera": peft.VeraConfig(r=16, target_modules="all-linear"),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules="all-linear"),
    "boft": peft.BOFTConfig(boft_block_size=4, target_modules="all-linear"),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules="all-linear"),
    "shira": peft.ShiraConfig(r=2, target_modules="all-linear", random_seed=3),
}


def made(name: str, model: Path, path: Path) -> Path:
    """The adapter with weights that change the answers."""
    torch.manual_seed(5)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), CONFIGS[name]).save_pretrained(path)
    tensors = load_file(path / "adapter_model.safetensors")
    moved = {
        n: t if n.endswith(("vera_A", "vera_B")) or not t.is_floating_point() else t + 0.5 * torch.randn_like(t)
        for n, t in tensors.items()
    }
    save_file(moved, path / "adapter_model.safetensors")
    return path


@pytest.mark.parametrize("name", [n if n == "vera" else pytest.param(n, marks=pytest.mark.wide) for n in CONFIGS])
def test_answers_are_pefts_own(name: str, model: Path, tmp_path: Path) -> None:
    adapter = made(name, model, tmp_path / "adapter")
    want = expected(model, peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter))
    assert want != expected(model)
    assert answers(opened(model, adapter)[1]) == want
    assert (
        main(
            [
                "export",
                "--model",
                str(model),
                "--adapters",
                str(adapter),
                "--merge_lora",
                "true",
                "--output_dir",
                str(tmp_path / "merged"),
            ]
        )
        == 0
    )
    assert answers(opened(tmp_path / "merged")[1]) == want
    assert answers(opened(model, adapter, merge=True)[1]) == want


def test_a_package_that_quantized_weights_need_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantized_training.importlib.util.find_spec
    monkeypatch.setattr(
        quantized_training.importlib.util,
        "find_spec",
        lambda name: None if name in ("gptqmodel", "optimum") else real(name),
    )
    set_config(folder(tmp_path / "model"), quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="pip install gptqmodel optimum"):
        load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(tmp_path / "model")), None)
