"""Layers in 4 bits compute from the stored values on every CPU, those with AVX512-BF16 included."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import AutoModelForCausalLM

from megaswift.bridge.hf.bits import bitsandbytes_config, disable_4bit_cpu_repacking
from megaswift.config import SwiftConfig
from megaswift.engine.torch.model import build_model
from megaswift.engine.torch.quantized_weights import dequantized_weight, quantized_from_pretrained_arguments
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.run.engines import base_quantization
from tests.four_bits import cpu_with
from tests.trainers.inputs import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def layer(rows: int, columns: int) -> Linear4bit:
    made = Linear4bit(columns, rows, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return made.to("cpu").eval().requires_grad_(False)


def test_bitsandbytes_still_repacks_in_place() -> None:
    """What is switched off is still there: scales of a layer become bfloat16 by one call."""
    with cpu_with(avx512_bf16=True):
        linear = layer(32, 64)
    scales = linear.weight.quant_state.absmax.clone()
    repacked = linear.support_avx512bf16_for_cpu
    disable_4bit_cpu_repacking(nn.ModuleList([linear]))
    linear(torch.randn(3, 64))
    assert repacked and torch.equal(linear.weight.quant_state.absmax, scales)
    linear.support_avx512bf16_for_cpu = True
    # On other CPUs no product follows: the kernel for the packed weights is not registered there.
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        linear(torch.randn(3, 64))
    assert linear.weight.quant_state.absmax.dtype == torch.bfloat16


@pytest.mark.parametrize("double", [False, True])
def test_the_torch_engine_evaluates_and_merges_from_the_stored_values(folder: Path, double: bool) -> None:
    """An evaluation between two steps changes neither the next forward pass nor what a merge reads."""
    options = {"engine": "ddp", "train_type": "qlora", "bnb_4bit_use_double_quant": double}
    cfg, cpu = SwiftConfig(model=str(folder), **options), torch.device("cpu")
    ids = torch.arange(4, 40)[None]
    with cpu_with(avx512_bf16=True):
        further = quantized_from_pretrained_arguments(folder, base_quantization(cfg), cpu, torch.float32)
        model = build_model(
            folder,
            cfg.model,
            0,
            weights=True,
            spec=spec_from_family_or_size_fields(folder),
            further=further,
            empty=False,
        )
    packed = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert packed
    before = [dequantized_weight(m) for m in packed]
    with torch.no_grad():
        training = model.train()(ids).logits
        evaluated = model.eval()(ids).logits
        again = model.train()(ids).logits
    assert torch.equal(evaluated, training) and torch.equal(again, training)
    assert all(torch.equal(dequantized_weight(m), values) for m, values in zip(packed, before, strict=True))
    with cpu_with(avx512_bf16=False):
        how = bitsandbytes_config(4, torch.float32, double=double)
        theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(theirs.eval()(ids).logits, evaluated)
