"""A LoRA run on gpt_oss's experts as users start one: its folder in PEFT, merged in transformers, and on from
checkpoint and folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.models import build
from tests.trainers.inputs import logits, write_conversations, write_model
from tests.trainers.runs import finish, run, start

OPTIONS = (
    "--train_type",
    "lora",
    "--max_steps",
    4,
    "--report_to",
    "none",
    "--per_device_train_batch_size",
    4,
    "--lr",
    1e-2,
)
EXPERTS = (
    "--lora_rank",
    4,
    "--target_modules",
    "none",
    "--target_parameters",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)


@pytest.mark.process
@pytest.mark.slow
def test_a_run_goes_on_elsewhere_and_out_to_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = build("gpt_oss", tmp_path / "model")
    for file in write_model(tmp_path / "other").glob("*token*"):
        shutil.copy(file, model)
    shutil.copy(tmp_path / "other" / "chat_template.jinja", model)
    write_conversations(tmp_path / "data.jsonl")
    inputs = [
        "--model",
        str(model),
        "--dataset",
        str(tmp_path / "data.jsonl"),
        "--dataset_cache_dir",
        str(tmp_path / "cache"),
    ]
    out, again = tmp_path / "out", tmp_path / "again"
    run(inputs, out, *OPTIONS, *EXPERTS, "--tp", 2, "--ep", 2, "--save_steps", 2, "--merge_lora", "true")
    plain = logits(AutoModelForCausalLM.from_pretrained(model))
    with_adapter = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(out / "hf"))
    assert float((with_adapter - merged).abs().max()) < 1e-5 < float((with_adapter - plain).abs().max()) / 100
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (
        config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
        and config["target_modules"] == []
    )
    step = out / "checkpoints" / "step-2"
    run(inputs, again, *OPTIONS, *EXPERTS, "--resume_from_checkpoint", step, ranks=1)
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (again, out))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs[2:]], rel=1e-5)
    after, want = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (again, out))
    assert after.keys() == want.keys() and len(want) == 4 * 4
    assert all(float((t - want[n]).abs().max()) < 1e-3 * float(want[n].abs().max()) for n, t in after.items())
    run(inputs, tmp_path / "more", *OPTIONS, "--adapters", out / "adapter", ranks=1)
    assert read_lines(tmp_path / "more" / "metrics.jsonl")[0]["loss"] < theirs[0]["loss"]
    process = start(inputs, tmp_path / "refused", *OPTIONS, "--target_modules", "gate_up_proj", ranks=1)
    assert "--target_parameters mlp.experts.gate_up_proj" in finish(process) and process.returncode != 0
