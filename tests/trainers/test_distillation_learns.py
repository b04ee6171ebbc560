"""A student learns from its teacher what its rows do not have: their answers are random letters.

The task: the letter after the first one of four. Questions for the score are in no training data.
Covers: megaswift/run/distillation_task.py.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.inputs import write_model
from tests.trainers.runs import run

pytestmark = [pytest.mark.process, pytest.mark.slow]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEEDS = (1, 2, 3)
ASKED = 200
USUAL = ("--report_to", "none", "--lr_scheduler_type", "constant", "--max_length", 32, "--weight_decay", 0)
TAUGHT = ("--max_steps", 150, "--per_device_train_batch_size", 32, "--lr", "1e-2")
DISTILLED = ("--lmbda", 0.5, "--max_completion_length", 3, "--max_steps", 100)


def rows(count: int, seed: int, right: bool) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    while len(made) < count:
        question = "".join(draw.choices(LETTERS[:-1], k=4))
        if (hash_of(question) < 0.2) != (seed == 0):  # a fifth of the questions is for the score alone
            continue
        answer = LETTERS[LETTERS.index(question[0]) + 1] if right else draw.choice(LETTERS)
        turns = [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
        made.append({"messages": turns})
    return made


def hash_of(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return random.Random(text).random()


def write(path: Path, made: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def write_student(folder: Path, seed: int) -> Path:
    """A model of random weights."""
    from transformers import AutoModelForCausalLM

    write_model(folder, layers=1)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder).config).save_pretrained(folder)
    return folder


def score(folder: Path) -> tuple[float, float]:
    """The 95% interval of the share of right answers to the held-out questions, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = rows(ASKED, 0, True)
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        for row in asked
    ]
    with torch.no_grad():
        chosen = model(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    right = sum(tokenizer.decode([i]) == row["messages"][1]["content"] for i, row in zip(chosen, asked, strict=True))
    share = right / ASKED  # Wilson's interval
    middle = share + 1.96**2 / (2 * ASKED)
    half = 1.96 * math.sqrt(share * (1 - share) / ASKED + 1.96**2 / (4 * ASKED**2))
    return (middle - half) / (1 + 1.96**2 / ASKED), (middle + half) / (1 + 1.96**2 / ASKED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """teacher/hf, which sft has taught the task, and questions with random answers."""
    made = tmp_path_factory.mktemp("learns")
    write(made / "right.jsonl", rows(1600, 1, True))
    write(made / "random.jsonl", rows(1600, 2, False))
    write_model(made / "model")
    inputs = ["--model", str(made / "model"), "--dataset", str(made / "right.jsonl")]
    inputs += ["--dataset_cache_dir", str(made / "cache")]
    run(inputs, made / "teacher", *USUAL, *TAUGHT, ranks=1)
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_student_learns_what_only_its_teacher_can_do(seed: int, folder: Path, tmp_path: Path) -> None:
    """Half of the steps are on its own completions. The same rows alone teach nothing."""
    student = write_student(tmp_path / "student", seed)
    inputs = ["--model", str(student), "--dataset", str(folder / "random.jsonl"), "--seed", str(seed)]
    inputs += ["--dataset_cache_dir", str(folder / "cache")]
    taught = (*USUAL, *TAUGHT, *DISTILLED, "--teacher_model", folder / "teacher/hf")
    run(inputs, tmp_path / "distilled", *taught, ranks=1, task="gkd")
    run(inputs, tmp_path / "rows", *USUAL, *TAUGHT, ranks=1)
    before, after, alone, teacher = map(
        score, (student, tmp_path / "distilled/hf", tmp_path / "rows/hf", folder / "teacher/hf")
    )
    print(f"seed {seed}: before {before}, distilled {after}, rows alone {alone}, teacher {teacher}")
    assert teacher[0] > 0.9
    assert after[0] > 0.5 > max(before[1], alone[1])
