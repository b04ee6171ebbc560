"""What is said of adapters and of quantized checkpoints before a process group exists.

Covers: megaswift/bridge/adapters/peft_config.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.models import quantized_training
from tests.bridge.folders import set_config
from tests.run.checks.test_preflight import problems
from tests.trainers.inputs import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def said(model: Path, **options: Any) -> list[str]:
    """All problems of a run of two processes."""
    out = str(model.parent / "out")
    return problems(
        SwiftConfig(
            **{"task": "sft", "model": str(model), "dataset": "d", "output_dir": out, "engine": "ddp", **options}
        ),
        2,
    )


@pytest.mark.parametrize(
    ("method", "packages"),
    [("gptq", ("gptqmodel", "optimum")), ("awq", ("gptqmodel",)), ("compressed-tensors", ("compressed-tensors",))],
)
def test_a_package_that_is_not_there_is_named(
    method: str, packages: tuple[str, ...], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quantized_training.importlib.util.find_spec
    monkeypatch.setattr(
        quantized_training.importlib.util,
        "find_spec",
        lambda name: None if name in ("gptqmodel", "optimum", "compressed_tensors") else real(name),
    )
    set_config(model, quantization_config={"quant_method": method, "bits": 4})
    found = said(model, train_type="lora")
    assert len(found) == 1 and f"quantized ({method})" in found[0] and f"pip install {' '.join(packages)}" in found[0]


def test_quantized_weights_and_what_they_cannot_do(model: Path) -> None:
    set_config(model, quantization_config={"quant_method": "fp8"})
    assert said(model, train_type="lora") == []
    assert "--engine megatron, which trains them dequantized" in said(model)[0]
    text = "\n".join(said(model, train_type="qlora", merge_lora=True))
    assert (
        "would quantize weights that are already quantized" in text and "--merge_lora true: needs unquantized" in text
    )
    set_config(model, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert said(model, train_type="lora") == [] and "--train_type lora" in said(model)[0]
    assert "cannot be sharded" in said(model, train_type="lora", engine="fsdp2")[0]
    set_config(model, quantization_config={"quant_method": "hqq"})
    assert "supports training only with gptq, awq" in said(model, train_type="lora")[0]


def test_settings_that_peft_refuses(model: Path) -> None:
    assert "is not a field of PEFT's RoadConfig" in said(model, train_type="road", peft_config={"grop_size": "8"})[0]
    assert "did you mean group_size?" in said(model, train_type="road", peft_config={"grop_size": "8"})[0]
    assert "is set by an option" in said(model, train_type="miss", peft_config={"r": "8"})[0]
    assert "PEFT rejects it: " in said(model, train_type="road", peft_config={"variant": "road_9"})[0]
    assert "don't allow for a budgeting phase" in said(model, train_type="adalora", total_step=5, tinit=3, tfinal=2)[0]


def test_folders_of_other_adapters(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").touch()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "VERA"}))
    assert "contains vera adapters (train_type is lora)" in said(model, train_type="lora", adapters=str(folder))[0]
    assert said(model, train_type="vera", adapters=str(folder)) == []
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "ADALORA"}))
    assert "with final ranks" in said(model, train_type="adalora", adapters=str(folder))[0]


def test_a_missing_package_of_ours(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantized_training.importlib.util.find_spec
    monkeypatch.setattr(
        quantized_training.importlib.util,
        "find_spec",
        lambda name: None if name in ("bitsandbytes", "peft") else real(name),
    )
    text = "\n".join(said(model, train_type="qlora"))
    assert "needs the package bitsandbytes" in text and "needs the package peft" in text
