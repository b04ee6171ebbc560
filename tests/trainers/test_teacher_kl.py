"""GRPO on a teacher's log-probabilities, without a reward: advantages and their mean are transformers' own, on every
layout, and the divergence falls.

Covers: megaswift/run/teacher.py, megaswift/trainers/distillation/teacher.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.test_distillation_trl import randomize

SLOW = pytest.mark.slow
GROUP, BATCH, TEMPERATURE = 2, 8, 0.8
USUAL = (
    *("--advantage_estimator", "teacher_kl", "--num_generations", GROUP, "--global_batch_size", BATCH),
    *("--max_completion_length", 6, "--max_length", 32, "--temperature", TEMPERATURE, "--beta", 0),
    *("--torch_dtype", "float32", "--lr", "3e-3", "--report_to", "none", "--shuffle", "false", "--export_hf", "false"),
    *("--num_completions_with_tokens", BATCH),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("teacher_kl")
    write_model(made / "model")
    write_model(made / "teacher", layers=4, hidden_size=48, num_attention_heads=6)
    randomize(made / "teacher", 0.1)
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3)} for i in range(12)]
    (made / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def trained(folder: Path, out: Path, *options: object, ranks: int) -> list[Any]:
    inputs = ["--model", str(folder / "model"), "--teacher_model", str(folder / "teacher")]
    inputs += ["--dataset", str(folder / "prompts.jsonl"), "--dataset_cache_dir", str(folder / "cache")]
    run(inputs, out, *USUAL, *options, task="grpo", ranks=ranks)
    return list(read_lines(out / "metrics.jsonl"))


def gaps(folder: Path, lines: list[Any]) -> list[torch.Tensor]:
    """log p of the teacher less log p of the model at the temperature, for each completion, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    words = tokenizer.get_vocab()
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("teacher", "model")]
    found = []
    for line in lines:
        prompt = tokenizer(line["prompt"])["input_ids"]
        written = [words[text] if text in words else words[text[1:]] for text in line["token_texts"]]
        ids = torch.tensor([[*prompt, *written]])
        with torch.no_grad():
            both = [(m(ids).logits[0] / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1] for m in models]
        teacher, own = (logprobs.gather(1, torch.tensor(written)[:, None])[:, 0] for logprobs in both)
        found.append(teacher - own)
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2, "--teacher_tp", 1, "--teacher_pp", 2), 2),
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                ((), 1),
                (("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2),
                (("--per_device_train_batch_size", 2, "--teacher_tp", 2), 2),
                (("--engine", "ddp"), 2),
                (("--engine", "zero3"), 2),
            )
        ),
    ],
)
def test_advantages(layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path) -> None:
    metrics = trained(folder, tmp_path / "out", "--max_steps", 1, *layout, ranks=ranks)
    lines = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    want = gaps(folder, lines)
    for line, gap in zip(lines, want, strict=True):
        torch.testing.assert_close(torch.tensor(line["token_advantages"]), gap, atol=6e-4, rtol=0)  # three decimals
    assert metrics[0]["teacher_kl"] == pytest.approx(-float(torch.cat(want).mean()), abs=1e-5)
    # at ratio 1 the loss is the mean over tokens of the negative advantage
    assert metrics[0]["loss"] == pytest.approx(-float(torch.cat(want).mean()), abs=2e-5)


@pytest.mark.process
@SLOW
def test_the_divergence_falls(folder: Path, tmp_path: Path) -> None:
    found = [
        line["teacher_kl"] for line in trained(folder, tmp_path / "out", "--max_steps", 100, "--lr", "1e-2", ranks=1)
    ]
    assert sum(found[-10:]) < 0.75 * sum(found[:10])
