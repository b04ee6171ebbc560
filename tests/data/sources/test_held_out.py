"""The rows that a run holds out, by file and line; the text of its own evaluation documents is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.data.build import load_document_splits, load_preference_splits
from tests.data.makers import chat, config, jsonl, tokenizer
from tests.data.of_config import prompt_splits, row_places

QWEN = tokenizer("qwen", "qwen3")
COUNT = 24


def rows(task: str) -> list[object]:
    answers = {"rejected_response": "no"} if task == "dpo" else {}
    good = [{**chat(f"question number {i}?", "yes"), **answers} for i in range(COUNT)]
    return [*good[:7], "{broken", *good[7:]]


@pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
def test_held_out_rows(task: str, tmp_path: Path) -> None:
    """Behind a row that is skipped, lines are not numbers of rows."""
    file = jsonl(tmp_path / "d.jsonl", rows(task))
    rl = {"reward_funcs": ["format"]} if task == "grpo" else {}
    cfg = config(tmp_path, file, task, split_dataset_ratio=0.25, strict=False, seed=3, **rl)
    found = row_places(cfg, QWEN)
    assert found is not None and len(found) == COUNT // 4
    lines = Path(file).read_text().splitlines()
    texts = "\n".join(lines[int(place.rpartition(":")[2]) - 1] for place in found)
    if task == "grpo":
        prompts = prompt_splits(cfg, QWEN, 1)[1]
        held_out = [QWEN.decode(prompt.token_ids) for prompt in prompts or []]
    else:
        load = load_preference_splits if task == "dpo" else load_document_splits
        split = load(cfg.data, cfg.train, QWEN, task)[1]
        docs = getattr(split, "docs", split)
        held_out = [QWEN.decode(docs.read(i)[0]) for i in range(len(docs))]
    numbers = {text.split("question number ")[1].split("?")[0] for text in held_out}
    assert len(numbers) == COUNT // 4 and all(f"question number {n}?" in texts for n in numbers)


def test_all_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "d.jsonl", rows("sft"))
    assert row_places(config(tmp_path, file, strict=False), QWEN) is None
    assert row_places(config(tmp_path, file, val_dataset=file, strict=False), QWEN) is None
    drawn = row_places(config(tmp_path, f"{file}#5", strict=False), QWEN)
    assert drawn is not None and len(drawn) == 5
