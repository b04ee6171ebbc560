"""Adapters over weights in 4 and 8 bits, against plain transformers, PEFT and bitsandbytes in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.bridge.adapters.options.methods import METHODS
from tests.bridge.quantize import quantize_fp8
from tests.engine.torch.adapter_ranks import Run, adapted, far, model_of, orthogonal, plain, saved
from tests.engine.torch.adapters.test_peft_names import GO, SETTINGS, config_of, merged
from tests.parity.pool import Pool

pytestmark = pytest.mark.process


def loaded(folder: Path, **bits: Any) -> Any:
    """As PEFT's documentation has it: quantized, then prepared."""
    import peft
    from transformers import BitsAndBytesConfig

    model = model_of(folder, quantization_config=BitsAndBytesConfig(**bits), device_map={"": "cpu"})
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def reference(name: str, model: Any) -> Any:
    model = adapted(model, config_of(name))
    return plain(model, orthogonal, model.base_model.update_and_allocate) if name == "adalora" else plain(model)


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


DOUBLE = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
HALF = {"bnb_4bit_compute_dtype": torch.bfloat16}
EIGHT = {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, FOUR),
        *(
            pytest.param(o, b, marks=pytest.mark.slow)
            for o, b in (
                (DOUBLE, FOUR | DOUBLE),
                ({"bnb_4bit_compute_dtype": "bfloat16"}, FOUR | HALF),
                ({"recompute_granularity": "full"}, FOUR),
                ({"engine": "zero0"}, FOUR),
                ({"engine": "zero1"}, FOUR),
                ({"engine": "zero2"}, FOUR),
                ({"engine": "zero2_offload"}, FOUR),
                ({"train_type": "lora", "quantization_bit": 8}, EIGHT),
            )
        ),
    ],
)
def test_qlora_equals_peft_on_bitsandbytes(
    options: dict[str, Any], bits: dict[str, Any], pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """Products in 8 and 16 bits round differently where a batch is cut differently, so they are compared loosely."""
    folder, exact = dense, bits.get("bnb_4bit_compute_dtype") == torch.float32
    run = Run(
        folder,
        {"engine": "ddp", "train_type": "qlora", **SETTINGS["lora"][0], **options},
        adapter=tmp_path / "a",
        save=tmp_path / "step",
        merges=True,
    )
    got = pool.run(GO, run, 2)[0]
    want = reference("lora", loaded(folder, **bits))
    assert ("Linear8bitLt" if bits == EIGHT else "Linear4bit") in got.kinds
    assert got.losses == pytest.approx(want.losses, rel=1e-5 if exact else 2e-3)
    assert far(got.weights, want.weights) < (1e-4 if exact else 0.05)
    held = sum(p.stat().st_size for p in (tmp_path / "step" / "state").iterdir())
    assert held < 4 * sum(t.nbytes for t in got.weights.values()), (
        "three tensors a trained parameter, nothing of the base"
    )
    assert {n.split(".")[-2] for n in saved(tmp_path / "a")} >= {"lora_A", "lora_B", "lm_head"}
    trained = adapted(loaded(folder, **bits).dequantize(), config_of("lora"))
    trained.load_state_dict(got.weights, strict=False)
    assert far(got.merged, merged(trained, tmp_path)) < 1e-6, "what a sampler gets: the sum in full precision"


@pytest.mark.slow
def test_sizes_on_the_screen(pool: Pool, dense: Path) -> None:
    """The same number of parameters as without quantization; weights in bytes as bitsandbytes counts them."""
    ranks = {
        kind: pool.run(GO, Run(dense, {"engine": "ddp", "train_type": kind, **SETTINGS["lora"][0]}, last=0), 1)[0]
        for kind in ("lora", "qlora")
    }
    assert ranks["qlora"].elements == ranks["lora"].elements
    model = loaded(dense, **FOUR)
    linear = [p for p in model.parameters() if hasattr(p, "quant_state") and p.quant_state is not None]
    packed = sum(p.nbytes + p.quant_state.absmax.nbytes for p in linear)
    plain_bytes = 4 * sum(2 * p.numel() for p in linear)
    assert ranks["lora"].weight_bytes - ranks["qlora"].weight_bytes == plain_bytes - packed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [(name, bits) for name, method in METHODS.items() for bits in method.bits])
def test_other_adapters_over_few_bits(name: str, bits: int, pool: Pool, dense: Path) -> None:
    folder = dense
    options = {"engine": "ddp", "train_type": name, "quantization_bit": bits, **SETTINGS[name][0]}
    got = pool.run(GO, Run(folder, options), 2)[0]
    want = reference(name, loaded(folder, **(FOUR if bits == 4 else {"load_in_8bit": True})))
    assert got.losses == pytest.approx(want.losses, rel=1e-5 if bits == 4 else 2e-3)
    assert far(got.weights, want.weights) < (1e-4 if bits == 4 else 0.05)


@pytest.mark.slow
def test_lora_on_a_folder_in_fp8(pool: Pool, dense: Path, tmp_path: Path) -> None:
    """Dequantized by transformers while it is loaded, as plain weights of these values would be."""
    from transformers import FineGrainedFP8Config

    folder = quantize_fp8(Path(shutil.copytree(dense, tmp_path / "fp8")), (8, 16))
    got = pool.run(GO, Run(folder, {"engine": "ddp", "train_type": "lora", **SETTINGS["lora"][0]}), 2)[0]
    model = torch.nn.Module.float(model_of(folder, quantization_config=FineGrainedFP8Config(dequantize=True)))
    want = plain(adapted(model, config_of("lora")))
    assert got.losses == pytest.approx(want.losses, rel=1e-5) and far(got.weights, want.weights) < 1e-4
