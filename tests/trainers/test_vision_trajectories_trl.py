"""Steps of preference training on rows with images beside TRL's own DPOTrainer: the same vision-language model, rows
and optimizer, float32; loss and gradient norm of every step.

TRL's trainer runs as installed, on one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity import vision
from tests.trainers.runs import run
from tests.trainers.test_trajectories_trl import ALIKE, BATCH, SPREAD, STEPS, arguments, assert_same, curve
from tests.trainers.vision_rows import inner_processor, trl_rows, write_pairs

pytestmark = [pytest.mark.process, pytest.mark.slow]
WHOLE = ("--freeze_vit", "false", "--freeze_aligner", "false")
KINDS = ["qwen2_vl", "llava", "gemma3"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and the same pairs in the shapes of both toolkits."""
    made = tmp_path_factory.mktemp("pairs")
    vision.write_model(request.param, made / "model")
    write_pairs(made, STEPS * BATCH)
    return made


def of_trl(folder: Path, adapter: Path | None = None, **options: Any) -> list[tuple[float, float]]:
    """TRL's curve; with PEFT from `adapter` on, where it is given."""
    import trl
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder / "model")
    reference = AutoModelForImageTextToText.from_pretrained(folder / "model") if adapter is None else None
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return curve(
        trl.DPOTrainer(
            model=model,
            ref_model=reference,
            args=trl.DPOConfig(**arguments(folder) | {"beta": 0.5} | options),
            train_dataset=trl_rows(folder / "trl.jsonl"),
            processing_class=inner_processor(folder / "model"),
        )
    )


def ours(folder: Path, out: Path, *options: object, rows: str = "swift") -> list[tuple[float, float]]:
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / f"{rows}.jsonl")]
    inputs += ["--dataset_cache_dir", str(folder / "cache"), "--beta", "0.5"]
    spread = "--global_batch_size" in options
    inputs += [] if spread else ["--per_device_train_batch_size", str(BATCH)]
    usual = [word for pair in zip(ALIKE[::2], ALIKE[1::2], strict=True) if pair[0] not in options for word in pair]
    run(inputs, out, *usual, *options, task="dpo", ranks=2 if spread else 1)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def dpo(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder)


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        ("swift", ("--engine", "ddp")),
        ("trl", ("--engine", "ddp", *SPREAD)),
        ("swift", ("--engine", "fsdp2", *SPREAD)),
        ("trl", ("--engine", "zero3", *SPREAD)),
        ("swift", ("--engine", "ddp", "--precompute_ref_log_probs", "true")),
    ],
)
def test_dpo(
    rows: str, layout: tuple[object, ...], folder: Path, dpo: list[tuple[float, float]], tmp_path: Path
) -> None:
    assert_same(ours(folder, tmp_path / "out", *layout, *WHOLE, rows=rows), dpo)


@pytest.mark.parametrize("layout", [("--engine", "ddp"), ("--engine", "fsdp2", *SPREAD)])
def test_adapters(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Adapters on the language model that start at random numbers on both sides; their reference is how they start."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    adapter = tmp_path / "adapter"
    targets = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    base = AutoModelForImageTextToText.from_pretrained(folder / "model")
    get_peft_model(base, lora).save_pretrained(adapter)
    mine = ours(folder, tmp_path / "out", "--train_type", "lora", "--adapters", adapter, *layout)
    assert_same(mine, of_trl(folder, adapter))


def test_new_adapters_have_the_model_as_reference(folder: Path, tmp_path: Path) -> None:
    """Our own first adapters, taken from a step of next to nothing, go on in PEFT."""
    lora = ("--engine", "ddp", "--train_type", "lora", "--lora_rank", 4)
    ours(folder, tmp_path / "first", *lora, "--max_steps", 1, "--lr", 1e-30)
    mine, theirs = ours(folder, tmp_path / "out", *lora), of_trl(folder, tmp_path / "first" / "adapter")
    assert theirs[0][0] == pytest.approx(0.6931472, abs=1e-6)
    assert_same(mine, theirs)


@pytest.mark.parametrize(
    "options", [("--vit_lr", 1e-30, *WHOLE), ("--freeze_vit", "true", "--freeze_aligner", "false")]
)
def test_parts_stay_or_move_as_they_are_asked_to(options: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """At 1e-30, or frozen, the encoder stays as it is; the aligner and the language model move."""
    ours(folder, tmp_path / "out", "--engine", "ddp", "--export_hf", "true", "--lr", 1e-2, *options)
    base, made = (load_file(f / "model.safetensors") for f in (folder / "model", tmp_path / "out" / "hf"))
    vit, aligner = ("visual.", "vision_tower."), ("merger", "projector")
    tower = {n for n in base if any(p in n for p in vit) and not any(p in n for p in aligner)}
    moved = {n for n in base if not torch.equal(base[n], made[n])}
    assert tower and not moved & tower
    joins = {n for n in base if any(p in n for p in aligner)}
    assert joins & moved and (base.keys() - tower - joins) & moved
