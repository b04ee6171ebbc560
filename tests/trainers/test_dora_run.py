"""A DoRA run as users start one: its folder in PEFT, merged in transformers, going on from a checkpoint and from the
folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.bridge.adapters.plan import MAGNITUDE
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import logits, write_inputs
from tests.trainers.runs import finish, run, start

DORA = ("--train_type", "lora", "--use_dora", "true", "--lora_rank", 4, "--max_steps", 4, "--report_to", "none")


@pytest.mark.process
@pytest.mark.slow
def test_a_run_goes_on_elsewhere_and_out_to_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    inputs = write_inputs(tmp_path)
    out, again = tmp_path / "out", tmp_path / "again"
    run(inputs, out, *DORA, "--tp", 2, "--save_steps", 2, "--merge_lora", "true")
    with_adapter = logits(
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs[1]), out / "adapter")
    )
    merged = logits(AutoModelForCausalLM.from_pretrained(out / "hf"))
    assert float((with_adapter - merged).abs().max()) < 1e-5
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    step = out / "checkpoints" / "step-2"
    run(inputs, again, *DORA, "--resume_from_checkpoint", step, ranks=1)
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (again, out))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs[2:]], rel=1e-5)
    first, after, want = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (step, again, out))
    assert after.keys() == want.keys()
    assert all(float((t - want[n]).abs().max()) < 1e-3 * float(want[n].abs().max()) for n, t in after.items())
    assert all(not torch.equal(first[n], t) for n, t in want.items() if n.endswith(MAGNITUDE))
    process = start(inputs, tmp_path / "refused", "--train_type", "qlora", *DORA[2:], ranks=1)
    assert "does not support DoRA" in finish(process) and process.returncode != 0
