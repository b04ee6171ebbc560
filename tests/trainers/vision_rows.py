"""Rows with images in the shapes of TRL and ms-swift, and TRL's own trainers on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from tests.parity import vision

WORDS = "abcdefghij"
IMAGES = (1, 0, 2, 1)
"""Of each row in turn: one in four has none."""


def write_pairs(folder: Path, count: int) -> None:
    """trl.jsonl (`prompt`, `chosen`, `rejected`, `images`) and swift.jsonl (`messages`, `rejected_response`, `images`):
    the same pairs, images before the question."""
    names, draw = vision.write_images(folder / "images"), random.Random(7)
    shapes: dict[str, list[dict[str, Any]]] = {"trl": [], "swift": []}
    for i in range(count):
        pictures = [f"images/{draw.choice(names)}" for _ in range(IMAGES[i % len(IMAGES)])]
        question, good, bad = ("".join(draw.choices(WORDS, k=k)) for k in (draw.randint(2, 6), 3, draw.randint(4, 7)))
        ask, answer, other = (
            {"role": role, "content": text}
            for role, text in (("user", question + "?"), ("assistant", good), ("assistant", bad))
        )
        shapes["trl"].append({"prompt": [ask], "chosen": [answer], "rejected": [other], "images": pictures})
        tagged = {"role": "user", "content": "<image>" * len(pictures) + question + "?"}
        shapes["swift"].append({"messages": [tagged, answer], "rejected_response": bad, "images": pictures})
    for name, rows in shapes.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def trl_rows(path: Path) -> Any:
    """The rows of trl.jsonl as TRL takes them: a data set whose images `datasets` opens."""
    from datasets import Dataset, Image, Sequence

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["images"] = [str(path.parent / name) for name in row["images"]]
    return Dataset.from_list(rows).cast_column("images", Sequence(Image()))


def inner_processor(folder: Path) -> Any:
    """transformers' processor of a model folder."""
    return Processor(processor_folder_and_files_digest(folder, False)).inner
