"""Five steps of training beside TRL's own trainers: the same model, rows and optimizer, float32; loss and gradient norm of every step.

TRL's trainers run as installed, on one process. Equal counts in every micro-batch, so that its means are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

STEPS, BATCH, RATE = 5, 4, 2e-3
ALIKE = ("--max_steps", STEPS, "--lr", RATE, "--lr_scheduler_type", "constant", "--weight_decay", 0, "--adam_epsilon", 1e-6,
         "--shuffle", "false", "--report_to", "none", "--export_hf", "false")
SLOW = pytest.mark.slow
SPREAD = ("--per_device_train_batch_size", BATCH // 2, "--global_batch_size", BATCH)
LAYOUTS: list[Any] = [
    ("--tp", 2), *(pytest.param(layout, marks=SLOW) for layout in (
        ("--pp", 2), ("--cp", 2), SPREAD, ("--tp", 2, "--packing", "false"), ("--engine", "ddp", *SPREAD), ("--engine", "zero3", *SPREAD)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and rows in the shapes of both toolkits; answers of one length each, chosen and rejected of different ones."""
    made = tmp_path_factory.mktemp("trl")
    write_model(made / "model")
    pairs, judged = [], []
    for i in range(STEPS * BATCH):
        ask = [{"role": "user", "content": f"{i % 10}+{(7 * i) % 10}="}]
        good, bad = f"{(i + 7 * i) % 90 + 10}", f"{i % 9 + 1}{i % 7}{i % 5}"
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (good, bad))
        pairs.append({"prompt": ask, "chosen": chosen, "rejected": rejected})
        judged.append({"prompt": ask, "completion": chosen, "label": i % 3 != 1})
    for name, rows in (("pairs", pairs), ("judged", judged)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def curve(trainer: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a TRL trainer, unrounded."""
    losses: list[float] = []
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return list(zip(losses, norms, strict=True))


def arguments(folder: Path) -> dict[str, Any]:
    return {"output_dir": str(folder / "trl"), "per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": RATE,
            "lr_scheduler_type": "constant", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
            "max_grad_norm": 1.0, "optim": "adamw_torch", "logging_steps": 1, "report_to": "none", "save_strategy": "no", "bf16": False,
            "use_cpu": True, "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "disable_tqdm": True}


def of_trl(folder: Path, task: str, **options: Any) -> list[tuple[float, float]]:
    """TRL's curve of a task."""
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    model_folder, tokenizer = folder / "model", AutoTokenizer.from_pretrained(folder / "model")
    rows = load_dataset("json", data_files=str(folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")), split="train",
                        cache_dir=str(folder / "trl-cache"))
    if task == "rm":
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "scored", num_labels=1)
        return curve(trl.RewardTrainer(model=model, args=trl.RewardConfig(**arguments(folder), **options), train_dataset=rows,
                                       processing_class=tokenizer))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    kind, config = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig)}[task]
    reference = AutoModelForCausalLM.from_pretrained(model_folder)
    return curve(kind(model=model, ref_model=reference, args=config(**arguments(folder), **options), train_dataset=rows,
                      processing_class=tokenizer))


def ours(folder: Path, out: Path, task: str, *options: object) -> list[tuple[float, float]]:
    usual = [] if "--per_device_train_batch_size" in options else ["--per_device_train_batch_size", str(BATCH)]
    inputs = ["--model", str(folder / ("scored" if task == "rm" else "model")), "--dataset",
              str(folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")), "--dataset_cache_dir", str(folder / "cache"), *usual]
    run(inputs, out, *ALIKE, *options, task=task)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


def assert_same(mine: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    assert len(mine) == len(theirs) == STEPS
    for (loss, norm), (wanted, wanted_norm) in zip(mine, theirs, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5) and norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.fixture(scope="module")
def dpo(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder, "dpo", beta=0.5)


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo(layout: tuple[object, ...], folder: Path, dpo: list[tuple[float, float]], tmp_path: Path) -> None:
    assert_same(ours(folder, tmp_path / "out", "dpo", "--beta", 0.5, *layout), dpo)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--cp", 2)])
def test_kto(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """On one data-parallel rank: which answers are paired with which prompts depends on the micro-batch."""
    assert_same(ours(folder, tmp_path / "out", "kto", "--beta", 0.5, *layout), of_trl(folder, "kto", beta=0.5))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--engine", "ddp", *SPREAD)])
def test_reward_model(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1).save_pretrained(folder / "scored")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scored")
    theirs = of_trl(folder, "rm", center_rewards_coefficient=0.01)
    assert_same(ours(folder, tmp_path / "out", "rm", "--center_rewards_coefficient", 0.01, *layout), theirs)
