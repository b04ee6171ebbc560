"""Runs with PEFT's adapters as users start them: the folder they leave, its merge, going on from a step, other
ranks."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaswift.trainers.hooks.metrics import read_lines
from tests.run.test_training import run
from tests.trainers.inputs import logits, write_inputs

STEPS = (
    "--num_train_epochs",
    1,
    "--global_batch_size",
    16,
    "--save_steps",
    2,
    "--report_to",
    "none",
    "--engine",
    "ddp",
)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--train_type", "adalora", "--init_r", 6, "--target_r", 2, "--tfinal", 1),
        ("--train_type", "qlora", "--bnb_4bit_use_double_quant", "true"),
    ],
)
def test_a_run(options: tuple[object, ...], tmp_path: Path) -> None:
    """Three steps, of which a second start does the last one, to the last bit; the export is the merge into the weights
    as they were."""
    inputs, out, again = write_inputs(tmp_path, "1e-2"), tmp_path / "out", tmp_path / "again"
    run(inputs, out, *STEPS, *options, "--merge_lora", "true")
    run(inputs, again, *STEPS, *options, "--resume_from_checkpoint", out / "checkpoints" / "step-2")
    mine, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (again, out))
    assert mine.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in mine.items())
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and ("orth_loss" in lines[0]) == ("adalora" in options)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs[1]), out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out / "hf")
    assert float((logits(adapted) - logits(merged)).abs().max()) < 1e-5
    assert float((logits(adapted) - logits(AutoModelForCausalLM.from_pretrained(inputs[1]))).abs().max()) > 1e-3
    if "adalora" in options:
        ranks = [sum(kept) for kept in adapted.peft_config["default"].rank_pattern.values()]
        assert sum(ranks) == 2 * len(ranks), "the budget is spent"
