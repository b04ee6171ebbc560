"""A QLoRA run as users start one: the folder it leaves, going on from it on another layout, its merge into the weights
as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import finish, run, start

OPTIONS = ("--lora_rank", 4, "--max_steps", 4, "--report_to", "none", "--save_steps", 2)
QLORA = ("--train_type", "qlora", *OPTIONS)


@pytest.mark.process
@pytest.mark.slow
def test_a_run_resumes_elsewhere_and_merges_into_unquantized_weights(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    inputs, model = write_inputs(tmp_path, hidden_size=128, intermediate_size=128, head_dim=32), tmp_path / "model"
    out, again = tmp_path / "out", tmp_path / "again"
    text = run(inputs, out, *QLORA, "--tp", 2, "--merge_lora", "true")
    plain = run(inputs, tmp_path / "plain", "--train_type", "lora", *OPTIONS, "--tp", 2)
    memory = [float(t.split("memory", 1)[1].split("weights ", 1)[1].split()[0]) for t in (text, plain)]
    assert memory[0] < memory[1] / 3, memory
    run(inputs, again, *QLORA, "--resume_from_checkpoint", out / "checkpoints" / "step-2", ranks=1)
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (again, out))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs[2:]], rel=1e-5)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out / "hf")(ids).logits
        adapted = (
            peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out / "adapter")
            .eval()(ids)
            .logits
        )
    assert float((merged - adapted).abs().max()) < 1e-5
    was, now = (load_file(folder / "model.safetensors") for folder in (model, out / "hf"))
    assert torch.equal(was["lm_head.weight"], now["lm_head.weight"])
    process = start(
        inputs,
        tmp_path / "lora",
        "--train_type",
        "lora",
        *OPTIONS,
        "--resume_from_checkpoint",
        out / "checkpoints" / "step-2",
        ranks=1,
    )
    assert "the checkpoint's run had train_type qlora" in finish(process) and process.returncode != 0
