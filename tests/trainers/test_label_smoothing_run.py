"""`--label_smoothing_factor` and `--enable_dft_loss`: whole runs beside transformers' Trainer and TRL's SFTTrainer with
the same options; loss and gradient norm of every step, and the loss of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.trl_steps import ARGUMENTS

STEPS, BATCH, RATE, SMOOTHING = 3, 4, 2e-3, 0.2
ALIKE = f"--max_steps {STEPS} --lr {RATE} --lr_scheduler_type constant --weight_decay 0 --adam_epsilon 1e-6"
SPREAD = f"--per_device_train_batch_size {BATCH // 2} --global_batch_size {BATCH}"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and conversations whose answers have one length, so that transformers' mean of a batch is ours."""
    made = tmp_path_factory.mktemp("smoothing")
    write_model(made / "model")
    rows = [(f"{i % 10}+{7 * i % 10}=", f"{(i + 7 * i) % 90 + 10}") for i in range(STEPS * BATCH)]
    lines = (
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in rows
    )
    (made / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def tokenized(folder: Path) -> list[dict[str, list[int]]]:
    """The rows with labels on the answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = []
    for line in (folder / "data.jsonl").read_text().splitlines():
        ask, answer = (m["content"] for m in json.loads(line)["messages"])
        prompt, target = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (f"<u>{ask}<e><a>", f"{answer}<e>")
        )
        rows.append({"input_ids": prompt + target, "labels": [-100] * len(prompt) + target})
    return rows


@pytest.fixture(scope="module", params=["label smoothing", "dynamic fine-tuning"])
def theirs(folder: Path, request: pytest.FixtureRequest) -> tuple[list[str], list[float], list[float], float]:
    """Our options; losses, gradient norms and evaluation loss of transformers, or of TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    arguments: dict[str, Any] = ARGUMENTS | {
        "output_dir": str(folder / "theirs"),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "train_sampling_strategy": "sequential",
    }
    data = Dataset.from_list(tokenized(folder))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    if request.param == "label smoothing":
        words = ["--label_smoothing_factor", str(SMOOTHING)]
        args = TrainingArguments(**arguments, label_smoothing_factor=SMOOTHING)
        trainer: Any = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    else:
        words = ["--enable_dft_loss", "true"]
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        config = SFTConfig(**arguments, loss_type="dft", max_length=None)
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=data, eval_dataset=data, processing_class=tokenizer
        )
    losses: list[float] = []
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return words, losses[:STEPS], norms, float(trainer.evaluate()["eval_loss"])


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2",
        *(
            pytest.param(words, marks=SLOW)
            for words in ("--pp 2", "--cp 2", SPREAD, f"--engine ddp {SPREAD}", f"--engine fsdp2 {SPREAD}")
        ),
    ],
)
def test_losses_are_theirs(
    layout: str, folder: Path, theirs: tuple[list[str], list[float], list[float], float], tmp_path: Path
) -> None:
    data, out = str(folder / "data.jsonl"), tmp_path / "out"
    inputs = ["--model", str(folder / "model"), "--dataset", data, "--val_dataset", data, "--export_hf", "false"]
    batch = [] if "batch" in layout else ["--per_device_train_batch_size", str(BATCH)]
    words = [
        "--dataset_cache_dir",
        str(folder / "cache"),
        "--shuffle",
        "false",
        "--report_to",
        "none",
        *ALIKE.split(),
        *batch,
        *layout.split(),
    ]
    ours, losses, norms, evaluation = theirs
    run(inputs, out, *words, *ours, task="sft", ranks=2)
    lines = read_lines(out / "metrics.jsonl")
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-5)
    assert read_lines(out / "eval.jsonl")[-1]["loss"] == pytest.approx(evaluation, rel=1e-5)
