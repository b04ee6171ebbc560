"""A LoRA run as users start one: its folder, what PEFT and transformers make of it, going on from it, and what is
refused.

Covers: megaswift/engine/megatron/lora/checkpoint.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from megaswift.bridge.adapters.plan import PREFIX
from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import logits, write_conversations, write_inputs, write_model
from tests.trainers.runs import finish, run, start

LORA = (
    "--train_type",
    "lora",
    "--lora_rank",
    4,
    "--max_steps",
    4,
    "--report_to",
    "none",
    "--modules_to_save",
    "lm_head",
    "--target_modules",
    "q_proj",
    "linear_fc1",
    r".*\.1\.self_attn\.o_proj",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("lora") / "out"
    return out, run(inputs, out, *LORA, "--tp", 2, "--save_steps", 2, "--merge_lora", "true")


@pytest.mark.process
def test_the_adapter_loads_in_peft_and_its_merge_in_transformers(whole: tuple[Path, str], inputs: list[str]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    out, text = whole
    assert {p.name for p in out.iterdir()} == {
        "run.lock",
        "run_id",
        "stacks",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "adapter",
        "hf",
        "loss.png",
        "report.html",
        "train.log",
    }
    lines = read_lines(out / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] and "trained (" in text
    plain = logits(AutoModelForCausalLM.from_pretrained(inputs[1]))
    with_adapter = logits(
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs[1]), out / "adapter")
    )
    merged = logits(AutoModelForCausalLM.from_pretrained(out / "hf"))
    assert float((with_adapter - merged).abs().max()) < 1e-5 < float((with_adapter - plain).abs().max()) / 100
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == inputs[1]


@pytest.mark.process
def test_a_checkpoint_without_base_weights_goes_on_elsewhere(
    whole: tuple[Path, str], inputs: list[str], tmp_path: Path
) -> None:
    out, _ = whole
    step = out / "checkpoints" / "step-2"
    index = read_torch_dist_metadata(step / "engine")
    assert isinstance(index, Metadata)
    kinds = ("exp_avg", "exp_avg_sq", "param")
    names = {key.removeprefix(f"optimizer.state.{kind}.") for key in index.state_dict_metadata for kind in kinds}
    trained = load_file(step / "adapter" / "adapter_model.safetensors")
    assert {n.split(".", 1)[1] for n in names if n.startswith(("adapter.", "saved."))} == {
        n.removeprefix(PREFIX) for n in trained
    }
    sizes = {key: tuple(m.size) for key, m in index.state_dict_metadata.items()}
    assert all(key.startswith(("adapter.", "saved.", "optimizer.state.")) for key in sizes)
    assert sum(math.prod(s) for s in sizes.values()) == 3 * sum(t.numel() for t in trained.values())
    assert json.loads((step / "manifest.json").read_text())["base"] == inputs[1]
    run(inputs, tmp_path / "out", *LORA, "--resume_from_checkpoint", step, ranks=1)
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "out", out))
    assert [line["step"] for line in ours] == [3, 4]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs[2:]], rel=1e-5)
    after, want = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (tmp_path / "out", out))
    assert after.keys() == want.keys()
    assert all(float((t - want[n]).abs().max()) < 1e-3 * float(want[n].abs().max()) for n, t in after.items())


@pytest.mark.process
@pytest.mark.slow
def test_two_tasks_from_one_base(whole: tuple[Path, str], inputs: list[str], tmp_path: Path) -> None:
    """A second run on other data: the base stays as it is, and PEFT holds both adapters on one model."""
    import peft
    from transformers import AutoModelForCausalLM

    base = Path(inputs[1])
    before = {p.name: p.read_bytes() for p in base.iterdir()}
    write_conversations(tmp_path / "other.jsonl", seed=9)
    words = [inputs[0], inputs[1], "--dataset", str(tmp_path / "other.jsonl"), *inputs[4:]]
    options = (
        "--train_type",
        "lora",
        "--lora_rank",
        2,
        "--max_steps",
        4,
        "--report_to",
        "none",
        "--target_modules",
        "v_proj",
    )
    run(words, tmp_path / "second", *options, ranks=1)
    assert {p.name: p.read_bytes() for p in base.iterdir()} == before
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), whole[0] / "adapter", adapter_name="first"
    )
    first = logits(model)
    model.load_adapter(tmp_path / "second" / "adapter", adapter_name="second")
    model.set_adapter("second")
    second = logits(model)
    alone = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "second" / "adapter")
    assert torch.equal(second, logits(alone)) and not torch.equal(first, second)
    model.set_adapter("first")
    assert torch.equal(logits(model), first)


@pytest.mark.process
@pytest.mark.slow
def test_another_base_or_another_kind_of_training_is_refused(
    whole: tuple[Path, str], inputs: list[str], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    step = whole[0] / "checkpoints" / "step-2"
    process = start(
        ["--model", str(model), *inputs[2:]], tmp_path / "out", *LORA, "--resume_from_checkpoint", step, ranks=1
    )
    assert "model's base_weights: is " in finish(process) and process.returncode != 0
    process = start(inputs, tmp_path / "full", "--max_steps", 4, "--resume_from_checkpoint", step, ranks=1)
    text = finish(process)
    assert "the checkpoint's run had train_type lora" in text and process.returncode != 0
