"""First adapters by other methods than the default: PEFT's own initialization is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaswift.bridge import nf4
from megaswift.bridge.adapters.initial import first_matrices, write_initial_adapter
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from tests.trainers.inputs import logits, write_model

RANK, ALPHA = 4, 6.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", hidden_size=64, intermediate_size=128)


def config(model: Path, method: str, **more: Any) -> SwiftConfig:
    kind = "qlora" if method == "loftq" else "lora"
    options = {"lora_rank": RANK, "lora_alpha": ALPHA, "init_weights": method, **more}
    return SwiftConfig(model=str(model), train_type=kind, **options)


def initial_adapter(cfg: SwiftConfig, folder: Path, adapter: Path, residual: Path) -> Path:
    return write_initial_adapter(cfg.lora, cfg.train.seed, True, folder, adapter, residual)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def changes(peft_model: Any) -> dict[str, torch.Tensor]:
    """scale x B A of each layer, which does not depend on the signs of singular vectors."""
    return {
        name: module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
        for name, module in peft_model.named_modules()
        if hasattr(module, "lora_A")
    }


@pytest.mark.wide
@pytest.mark.parametrize("method", ["pissa", "olora", "pissa_niter_4"])
@pytest.mark.parametrize("rslora", [False, True])
def test_what_changes_the_base_is_peft_s(
    method: str, rslora: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base weights, scale x B A, and the sum, which is the model itself. Of the randomized method with one draw."""
    real = torch.svd_lowrank

    def drawn(weight: torch.Tensor, rank: int, niter: int) -> Any:
        torch.manual_seed(3)
        return real(weight, rank, niter=niter)

    monkeypatch.setattr(torch, "svd_lowrank", drawn)
    monkeypatch.setattr("peft.tuners.lora.layer.svd_lowrank", drawn)
    cfg = config(model, method, use_rslora=rslora, modules_to_save=["lm_head"])
    base = initial_adapter(cfg, model, tmp_path / "adapter", tmp_path / "residual")
    assert base == tmp_path / "residual" and (base / "tokenizer.json").is_file()
    ours = PeftModel.from_pretrained(loaded(base), tmp_path / "adapter")
    options = LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=rslora, target_modules="all-linear", init_lora_weights=method
    )
    theirs = get_peft_model(loaded(model), options)
    limit = 1e-5
    for name, want in changes(theirs).items():
        assert torch.allclose(changes(ours)[name], want, atol=limit * float(want.abs().max()), rtol=0), name
    residual = {n: p for n, p in theirs.named_parameters() if "base_layer" in n}
    stored = dict(ours.named_parameters())
    assert residual and all(torch.allclose(stored[n], p, atol=limit, rtol=0) for n, p in residual.items())
    assert torch.allclose(logits(ours), logits(loaded(model)), atol=1e-4)
    assert not torch.allclose(logits(loaded(base)), logits(loaded(model)), atol=1e-3)


def test_gaussian_and_false_are_distributed_as_peft_s(model: Path, tmp_path: Path) -> None:
    gaussian, uniform = (first_matrices(torch.zeros(3000, 2000), m, 8, 2.0, 5) for m in ("gaussian", "false"))
    layer = torch.nn.Linear(2000, 3000, bias=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

    for method, (a, b) in (("gaussian", gaussian), (False, uniform)):
        options = LoraConfig(r=8, target_modules=["layer"], init_lora_weights=method)  # type: ignore[arg-type]
        with torch.random.fork_rng():
            torch.manual_seed(5)
            theirs: Any = get_peft_model(Model(), options).base_model.model.layer  # type: ignore[arg-type]
        for ours, want in ((a, theirs.lora_A["default"].weight), (b, theirs.lora_B["default"].weight)):
            assert ours.shape == want.shape
            assert float(ours.std()) == pytest.approx(float(want.std()), rel=0.03)
            assert float(ours.abs().max()) == pytest.approx(float(want.abs().max()), rel=0.2)
    base = initial_adapter(config(model, "gaussian"), model, tmp_path / "adapter", tmp_path / "residual")
    assert base == model and not (tmp_path / "residual").exists()
    again = PeftModel.from_pretrained(loaded(model), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(loaded(model)))


def test_loftq_makes_up_for_what_four_bits_lose() -> None:
    """No matrix of this rank comes closer to the weight (Eckart and Young), whatever the scale."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    quantized = nf4.nf4_dequantize(*nf4.nf4_quantize(weight), torch.float32)
    a, b = first_matrices(weight, "loftq", 8, 1.5, 0)
    left = torch.linalg.matrix_norm(weight - quantized - 1.5 * b @ a)
    smallest = torch.linalg.svdvals(weight - quantized)[8:].square().sum().sqrt()
    assert float(left) == pytest.approx(float(smallest), rel=1e-5)
    assert float(left) < 0.95 * float(torch.linalg.matrix_norm(weight - quantized))


def test_an_earlier_start_s_files_are_kept_and_other_options_make_new_ones(model: Path, tmp_path: Path) -> None:
    adapter, residual = tmp_path / "adapter", tmp_path / "residual"
    initial_adapter(config(model, "pissa"), model, adapter, residual)
    first = (adapter / "adapter_model.safetensors").stat().st_mtime_ns
    initial_adapter(config(model, "pissa"), model, adapter, residual)
    assert (adapter / "adapter_model.safetensors").stat().st_mtime_ns == first
    initial_adapter(config(model, "olora"), model, adapter, residual)
    assert (adapter / "adapter_model.safetensors").stat().st_mtime_ns != first
    with pytest.raises(ConfigError, match="needs matrices of at least lora_rank 65"):
        initial_adapter(config(model, "pissa", lora_rank=65), model, adapter, residual)


def test_layers_of_bfloat16_stay_bfloat16(model: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    whole = loaded(model).to(torch.bfloat16)
    whole.save_pretrained(half)
    base = initial_adapter(config(half, "pissa"), half, tmp_path / "adapter", tmp_path / "residual")
    assert {t.dtype for t in load_file(base / "model.safetensors").values()} == {torch.bfloat16}
