"""GRPO on prompts with images from start to end, as users run it: a reward of one's own rises, the layout leaves no
trace, a resumed run is the same, adapters train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity import vision
from tests.trainers.runs import run
from tests.trainers.vision_rows import write_pairs

pytestmark = [pytest.mark.process, pytest.mark.slow]

REWARD = '''"""A reward of one's own, which looks at the files of a row's images."""

from pathlib import Path


def letters(completions, images, **_):
    """The share of a and b among the letters; all of a prompt's images are files."""
    assert all(Path(file).is_file() for files in images for file in files)
    texts = [one[0]["content"].replace(" ", "") for one in completions]
    return [sum(c in "ab" for c in text) / max(1, len(text)) for text in texts]
'''
STEPS = {
    "--report_to": "none",
    "--max_length": 64,
    "--max_completion_length": 6,
    "--num_generations": 4,
    "--generation_batch_size": 32,
    "--global_batch_size": 16,
    "--lr": 2e-3,
    "--adam_epsilon": 1e-6,
    "--lr_scheduler_type": "constant",
    "--max_steps": 6,
    "--save_steps": 3,
}


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grpo")
    vision.write_model(request.param, made / "model")
    write_pairs(made, 16)
    rows = [json.loads(line) for line in (made / "trl.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{"prompt": row["prompt"], "images": row["images"]} for row in rows]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    (made / "rewards.py").write_text(REWARD, encoding="utf-8")
    return made


def train(folder: Path, out: Path, *options: object, ranks: int = 1) -> list[dict[str, float]]:
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    inputs += ["--dataset_cache_dir", str(folder / "cache"), "--reward_funcs", f"{folder / 'rewards.py'}:letters"]
    given = {**STEPS, "--per_device_train_batch_size": 8 // ranks}
    words = [word for pair in given.items() if pair[0] not in options for word in pair]
    run(inputs, out, *words, *options, ranks=ranks, task="grpo")
    return read_lines(out / "metrics.jsonl")


def close(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for line, wanted in zip(mine, theirs, strict=True):
        for name in ("loss", "reward", "grad_norm"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), (line["step"], name)


def test_the_reward_rises(folder: Path, tmp_path: Path) -> None:
    lines = train(folder, tmp_path / "out", "--engine", "ddp", "--max_steps", 40, "--save_steps", 40, "--lr", 1e-2)
    first, last = (sum(line["reward"] for line in part) / 8 for part in (lines[:8], lines[-8:]))
    assert last > first + 0.2, (first, last)
    logged = read_lines(tmp_path / "out" / "completions.jsonl")
    assert any(part["type"] == "image" for line in logged for part in line["prompt"][0]["content"])


def test_the_layout_leaves_no_trace_and_a_resumed_run_goes_on(folder: Path, tmp_path: Path) -> None:
    """Resumed within a generation, whose completions come back with their images."""
    whole = ("--freeze_vit", "false", "--freeze_aligner", "false", "--beta", 0.1)
    one = train(folder, tmp_path / "one", "--engine", "ddp", *whole)
    for engine in ("ddp", "fsdp2"):
        close(train(folder, tmp_path / engine, "--engine", engine, *whole, ranks=2), one)
    step = tmp_path / "one" / "checkpoints" / "step-3"
    rest = train(folder, tmp_path / "rest", "--engine", "ddp", *whole, "--resume_from_checkpoint", step)
    assert [(n["loss"], n["reward"]) for n in rest] == [(n["loss"], n["reward"]) for n in one[3:]]
    base, made = (load_file(f / "model.safetensors") for f in (folder / "model", tmp_path / "one" / "hf"))
    tower = [n for n in base if ("visual." in n or "vision_tower." in n) and "merger" not in n]
    assert any(not torch.equal(base[n], made[n]) for n in tower), "no gradient reached the encoder"


def test_adapters_train_beside_images(folder: Path, tmp_path: Path) -> None:
    """The sampler gets merged weights; the same on one and two processes."""
    lora = ("--train_type", "lora", "--lora_rank", 4, "--beta", 0.1)
    one = train(folder, tmp_path / "one", "--engine", "ddp", *lora)
    close(train(folder, tmp_path / "two", "--engine", "fsdp2", *lora, ranks=2), one)
    adapter = load_file(tmp_path / "one" / "adapter" / "adapter_model.safetensors")
    assert adapter and all("language_model" in name for name in adapter)
