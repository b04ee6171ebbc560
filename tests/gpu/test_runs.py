"""Whole training runs on one GPU by the command that users type: float16, resuming each kind of optimizer, FP8 beside
bfloat16, packed rows, the export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import by_torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPTIMIZERS = {
    "adam": (),
    "precision aware": ("--precision_aware_optimizer", "true", "--distributed_optimizer", "true"),
    "on the host": ("--optimizer_cpu_offload", "true"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Widths that FP8 products and fused attention take."""
    folder = tmp_path_factory.mktemp("inputs")
    return write_inputs(folder, "1e-3", hidden_size=128, intermediate_size=256, head_dim=32)


def run(inputs: list[str], out: Path, *words: object) -> list[dict[str, Any]]:
    """The lines of a run's metrics that hold a loss."""
    by_torchrun(inputs, out, *words, "--report_to", "none", ranks=1)
    return [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]


def test_twelve_steps_in_float16(inputs: list[str], tmp_path: Path) -> None:
    """From the default loss scale: steps are skipped while it falls, and the run goes on."""
    lines = run(inputs, tmp_path / "out", "--fp16", "true", "--max_steps", 12)
    assert len(lines) == 12
    assert sum(not line.get("skipped") for line in lines) >= 4
    assert all(math.isfinite(line["loss"]) for line in lines)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumes(name: str, inputs: list[str], tmp_path: Path) -> None:
    """Eight steps, and the last four of them again from the checkpoint. Reductions on a GPU need not be repeatable, so
    that losses are near and not equal."""
    words = ("--torch_dtype", "bfloat16", *OPTIMIZERS[name], "--max_steps", 8)
    whole = run(inputs, tmp_path / "whole", *words, "--save_steps", 4)
    step = tmp_path / "whole" / "checkpoints" / "step-4"
    again = run(inputs, tmp_path / "again", *words, "--resume_from_checkpoint", step)
    assert [line["step"] for line in again] == [5, 6, 7, 8]
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in whole[4:]], rel=2e-3)


def test_fp8_learns_as_bfloat16(inputs: list[str], tmp_path: Path) -> None:
    """The mean loss of the last 20 of 200 steps within 0.5%."""
    words = ("--torch_dtype", "bfloat16", "--max_steps", 200)
    means = []
    for name, more in (("bf16", ()), ("fp8", ("--fp8_format", "hybrid", "--fp8_recipe", "tensorwise"))):
        lines = run(inputs, tmp_path / name, *words, *more)
        means.append(sum(line["loss"] for line in lines[-20:]) / 20)
    assert means[1] == pytest.approx(means[0], rel=5e-3)


def test_the_export_has_the_trained_weights(inputs: list[str], tmp_path: Path) -> None:
    """Transformers reads the folder; its loss on the training rows is below that of the first step."""
    from transformers import AutoModelForCausalLM

    lines = run(inputs, tmp_path / "out", "--torch_dtype", "bfloat16", "--max_steps", 20)
    folder = tmp_path / "out" / "hf"
    weights = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert all(torch.equal(state[n].to(t.dtype), t) for n, t in weights.items() if n in state)
    assert lines[-1]["loss"] < lines[0]["loss"]
