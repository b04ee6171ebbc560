"""Classifiers learn: on held-out rows accuracy rises beyond its 95% interval, for three seeds, from a language model
that has seen nothing.

Covers: megaswift/data/labeled/encode.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

HELD_OUT = 400


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return middle - half, middle + half


def text_row(draw: random.Random) -> dict[str, Any]:
    """Which of three letters comes most often is a text's class; the names have another order than their numbers."""
    counts = draw.sample(range(1, 6), 3)
    letters = [letter for letter, n in zip("abc", counts, strict=True) for _ in range(n)]
    draw.shuffle(letters)
    return {"text": "".join(letters), "label": ("third", "first", "second")[counts.index(max(counts))]}


def words_row(draw: random.Random) -> dict[str, Any]:
    """A word's tag is whether it is the same as the one before."""
    words = [draw.choice(["a", "b"]) for _ in range(8)]
    tags = ["new", *("same" if x == y else "new" for x, y in zip(words, words[1:], strict=False))]
    return {"tokens": words, "ner_tags": tags}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("task", ["seq_cls", "token_cls"])
def test_accuracy_on_held_out_rows(task: str, seed: int, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    draw = random.Random(seed)
    for name, count in (("train", 2000), ("held_out", HELD_OUT)):
        rows = [text_row(draw) if task == "seq_cls" else words_row(draw) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = [
        f"--{name}={tmp_path / file}" for name, file in (("dataset", "train.jsonl"), ("val_dataset", "held_out.jsonl"))
    ]
    words = ["--model", str(tmp_path / "model"), *data, "--dataset_cache_dir", str(tmp_path / "cache")]
    options = ("--max_steps", 250, "--lr", 5e-3, "--warmup_steps", 20, "--per_device_train_batch_size", 16)
    evaluated = ("--eval_on_start", "true", "--eval_steps", 250, "--per_device_eval_batch_size", 50)
    run(words, tmp_path / "out", *options, *evaluated, "--seed", seed, "--report_to", "none", ranks=1, task=task)
    first, last = (line["accuracy"] for line in read_lines(tmp_path / "out" / "eval.jsonl"))
    # rows are independent, words of a row are not: rows are counted
    assert interval(last, HELD_OUT)[0] > interval(first, HELD_OUT)[1], (first, last)
    assert last > 0.9
