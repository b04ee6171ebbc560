"""Whole runs that export their best model: on both engines, from checkpoints of all states, of weights, of adapters.

The best is the evaluation of the largest loss, which is an earlier one.
"""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

pytestmark = pytest.mark.process
BEST = ("--load_best_model_at_end", "true", "--metric_for_best_model", "eval_loss", "--greater_is_better", "true")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*words, "--val_dataset", words[words.index("--dataset") + 1], "--eval_iters", "1", "--report_to", "none"]


STEPS = ("--max_steps", 9, "--save_steps", 2, "--eval_steps", 2, "--lr_scheduler_type", "constant")
EARLY = ("--early_stop_interval", 1, "--save_total_limit", 1)


def test_the_export_is_the_best_model_s(inputs: list[str], tmp_path: Path) -> None:
    """Training goes on to step 4, whose evaluation ends it; the model is step 2's, as an export of weights alone has
    it, and its state is kept."""
    words = [*inputs, "--tp", "2"]
    text = run(words, tmp_path / "all", *STEPS, *BEST, *EARLY)
    run(words, tmp_path / "only", *STEPS, *BEST, *EARLY, "--save_only_model", "true")
    assert "best model: step 2 with loss" in text and "early stopping: 1 evaluation without improvement" in text
    assert [line["step"] for line in read_lines(tmp_path / "all" / "eval.jsonl")] == [2, 4]
    for name in ("all", "only"):
        assert {p.name for p in (tmp_path / name / "checkpoints").glob("step-*")} == {"step-2", "step-4"}
    ours, apart = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("all", "only"))
    last = load_file(tmp_path / "only" / "checkpoints" / "step-4" / "hf" / "model.safetensors")
    assert all(torch.equal(apart[name], tensor) for name, tensor in ours.items())
    assert any(not torch.equal(last[name], tensor) for name, tensor in ours.items())
    again = run(words, tmp_path / "all", *STEPS, *BEST, *EARLY, "--resume_from_checkpoint", "latest")
    assert "finished at step 4: early stopping" in again
    assert filecmp.cmp(*(tmp_path / name / "hf" / "model.safetensors" for name in ("all", "only")), shallow=False)


def test_the_torch_engine_s_best_model(inputs: list[str], tmp_path: Path) -> None:
    """Its checkpoints hold whole tensors under the model's names."""
    run(inputs, tmp_path, *STEPS, *BEST, *EARLY, "--engine", "ddp")
    export, best, last = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for folder in (tmp_path / "hf", *(tmp_path / "checkpoints" / f"step-{n}" / "engine" / "state" for n in (2, 4)))
    )
    assert all(torch.equal(best[f"weight.{name}"], tensor) for name, tensor in export.items())
    assert any(not torch.equal(last[f"weight.{name}"], tensor) for name, tensor in export.items())


def test_epochs_of_packed_rows(inputs: list[str], tmp_path: Path) -> None:
    """Evaluations and checkpoints stand where `epoch` passes a whole number; adapters are those of the best one."""
    out, by_epoch = tmp_path / "out", ("--eval_strategy", "epoch", "--save_strategy", "epoch")
    packed = ("--packing", "true", "--max_length", 64, "--num_train_epochs", 3, "--train_type", "lora")
    run(inputs, out, *BEST, *by_epoch, *packed)
    lines = read_lines(out / "metrics.jsonl")
    epochs = [0, *(int(line["epoch"]) for line in lines)]
    ends = [line["step"] for line, before in zip(lines, epochs, strict=False) if int(line["epoch"]) > before]
    evaluated = read_lines(out / "eval.jsonl")
    assert [line["step"] for line in evaluated] == ends and len(ends) == 3
    assert {json.loads(p.read_text())["step"] for p in out.glob("checkpoints/step-*/manifest.json")} == {*ends}
    best = max(evaluated, key=lambda line: line["loss"])["step"]
    adapters = (folder / "adapter" / "adapter_model.safetensors" for folder in (out, out / f"checkpoints/step-{best}"))
    assert best != ends[-1] and filecmp.cmp(*adapters, shallow=False)
