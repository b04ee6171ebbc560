"""Runs whose adapters start from the weights (--init_weights): on both engines, as PEFT trains and merges them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import logits, preference_inputs, write_inputs, write_preferences
from tests.trainers.runs import run

pytestmark = pytest.mark.process
OPTIONS = ("--train_type", "lora", "--lora_rank", 4, "--max_steps", 3, "--report_to", "none", "--lr", "1e-3")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = write_inputs(tmp_path_factory.mktemp("inputs"), hidden_size=64, intermediate_size=128, head_dim=16)
    return words[: words.index("--lr")]


@pytest.fixture(scope="module")
def native(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("native") / "out"
    run(inputs, out, *OPTIONS, "--init_weights", "pissa", "--merge_lora", "true", "--tp", 2, "--gbs", 4)
    return out


def test_an_export_that_peft_merges(native: Path) -> None:
    """The adapters belong to the residual model; both together are the merged export."""
    base = json.loads((native / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == (native / "residual_model").resolve()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), native / "adapter").merge_and_unload()
    assert torch.allclose(logits(model), logits(AutoModelForCausalLM.from_pretrained(native / "hf")), atol=1e-5)


def test_it_starts_from_the_first_adapters(native: Path) -> None:
    """Three steps of Adam move no number further than three learning rates."""
    first, last = (load_file(native / name / "adapter_model.safetensors") for name in ("initial_adapter", "adapter"))
    assert first.keys() == last.keys()
    moved = max(float((last[name] - first[name]).abs().max()) for name in first)
    assert 1e-4 < moved < 3.5e-3 and all(t.any() for t in first.values())


@pytest.mark.slow
def test_the_same_curve_on_both_engines(native: Path, inputs: list[str], tmp_path: Path) -> None:
    """The first loss is the model's own; tensor-parallel ranks train what one process with PEFT's layers trains."""
    run(inputs, tmp_path / "ddp", *OPTIONS, "--init_weights", "pissa", "--engine", "ddp", "--gbs", 4, ranks=1)
    run(inputs, tmp_path / "plain", *OPTIONS, "--engine", "ddp", "--gbs", 4, ranks=1)
    curves = [
        [line["loss"] for line in read_lines(out / "metrics.jsonl")]
        for out in (native, tmp_path / "ddp", tmp_path / "plain")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][0] == pytest.approx(curves[2][0], rel=1e-5)
    assert curves[0][2] != pytest.approx(curves[2][2], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("--tp", 2), ("--engine", "ddp")])
def test_the_reference_is_the_model_before_training(engine: tuple[str, object], tmp_path: Path) -> None:
    """Without a difference to it DPO's first loss is log 2; the residual model would be another."""
    write_preferences(tmp_path, 16)
    words = preference_inputs(tmp_path, "dpo")
    run(words, tmp_path / "out", *OPTIONS, "--init_weights", "olora", *engine, task="dpo")
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["olora", "loftq", "gaussian", "false", "pissa_niter_4"])
def test_a_resumed_run_is_the_uninterrupted_one(method: str, inputs: list[str], tmp_path: Path) -> None:
    kind = ("--train_type", "qlora") if method == "loftq" else ()
    words = [*inputs, "--init_lora_weights", method, "--save_steps", "1", *(() if method == "loftq" else ("--tp", "2"))]
    options = [*OPTIONS[2:], *(kind or OPTIONS[:2])]
    run(words, tmp_path / "a", *options)
    run(words, tmp_path / "b", *options, "--resume_from_checkpoint", tmp_path / "a" / "checkpoints" / "step-2")
    a, b = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in "ab")
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
