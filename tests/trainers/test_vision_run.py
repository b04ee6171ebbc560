"""A vision-language model from start to end, as users train it: it learns, is evaluated, resumed and exported; adapters
on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from megaswift.trainers.hooks.metrics import read_lines
from tests.parity import vision
from tests.run.test_training import run, values

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = (
    "--max_steps",
    6,
    "--save_steps",
    3,
    "--report_to",
    "none",
    "--per_device_train_batch_size",
    2,
    "--lr",
    "3e-2",
    "--adam_epsilon",
    "1e-6",
    "--dataloader_num_workers",
    1,
)


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("inputs")
    model, data = vision.write_model(request.param, root / "model"), vision.write_rows(root / "data.jsonl", 24)
    return [
        "--model",
        str(model),
        "--dataset",
        str(data),
        "--val_dataset",
        f"{data}#5",
        "--dataset_cache_dir",
        str(root / "cache"),
    ]


def test_learns_resumes_and_exports(inputs: list[str], tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    out, source = tmp_path / "out", Path(inputs[1])
    text = run(inputs, out, *STEPS, "--engine", "ddp")
    assert "Warning" not in text
    losses = [line["loss"] for line in read_lines(out / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.3
    assert len(read_lines(out / "eval.jsonl")) == 1
    rest = tmp_path / "rest"
    run(inputs, rest, *STEPS, "--engine", "ddp", "--resume_from_checkpoint", out / "checkpoints" / "step-3")
    assert values(rest) == values(out)[3:]
    mine, theirs, base = (load_file(folder / "model.safetensors") for folder in (out / "hf", rest / "hf", source))
    assert mine.keys() == base.keys() and all(torch.equal(mine[n], t) for n, t in theirs.items())
    still = {n for n, t in base.items() if torch.equal(t, mine[n])}
    assert still == {
        n for n in base if any(part in n for part in ("visual.", "vision_tower.", "multi_modal_projector."))
    }
    files = {p.name for p in source.iterdir()}
    assert files == {p.name for p in (out / "hf").iterdir()}
    other = tmp_path / "fsdp2"
    run(inputs, other, *STEPS, "--engine", "fsdp2", "--resume_from_checkpoint", out / "checkpoints" / "step-3")
    close = load_file(other / "hf" / "model.safetensors")
    assert max(float((close[n] - t).abs().max() / t.abs().max().clamp(min=1e-9)) for n, t in mine.items()) < 1e-4
    processor = Processor(processor_folder_and_files_digest(out / "hf", False)).inner
    row = vision.inputs_of(processor, Path(inputs[3]).read_text().splitlines()[0], Path(inputs[3]).parent)
    row.pop("assistant_masks")
    answer = AutoModelForImageTextToText.from_pretrained(out / "hf").generate(**row, max_new_tokens=2, min_new_tokens=2)
    assert answer.shape[1] == row["input_ids"].shape[1] + 2


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp2"])
def test_parts_have_their_own_learning_rates(inputs: list[str], tmp_path: Path, engine: str) -> None:
    """At 1e-30 the encoder stays as it is, and the rest moves; without weight decay."""
    rates = ["--freeze_vit", "false", "--freeze_aligner", "false", "--vit_lr", "1e-30", "--weight_decay", 0]
    run(inputs, tmp_path / "out", *STEPS, *rates, "--engine", engine)
    base, made = (load_file(f / "model.safetensors") for f in (Path(inputs[1]), tmp_path / "out" / "hf"))
    tower = {n for n in base if ("visual." in n or "vision_tower." in n) and "merger" not in n}
    moved = {n for n in base if not torch.equal(base[n], made[n])}
    assert tower and not moved & tower and len(moved) > len(base.keys() - tower) // 2


def test_adapters_stay_off_what_is_frozen(inputs: list[str], tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForImageTextToText

    out = tmp_path / "lora"
    run(inputs, out, *STEPS, "--engine", "fsdp2", "--train_type", "lora", "--lora_rank", 4, "--merge_lora", "true")
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    assert adapter and all("language_model" in name for name in adapter)
    losses = [line["loss"] for line in read_lines(out / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    model = peft.PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(inputs[1]), out / "adapter"
    ).eval()
    merged = AutoModelForImageTextToText.from_pretrained(out / "hf").eval()
    row = vision.inputs_of(
        Processor(processor_folder_and_files_digest(out / "hf", False)).inner,
        Path(inputs[3]).read_text().splitlines()[0],
        Path(inputs[3]).parent,
    )
    row.pop("assistant_masks")
    with torch.no_grad():
        assert float((model(**row).logits - merged(**row).logits).abs().max()) < 1e-5
