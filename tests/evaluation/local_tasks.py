"""Three tasks of lm-evaluation-harness over local files, and files of questions; all texts are of the tiny model's
characters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUMS = [(i, j) for i in range(4) for j in range(5)]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {file}, test: {file}}}}}
training_split: train
test_split: test
fewshot_config: {{sampler: first_n}}
{rest}
"""
CHOICE = """\
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ' '
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ANSWER = """\
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{answer}}'
generation_kwargs: {until: [x], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, ignore_punctuation: true}]"""
TEXT = """\
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def choices(folder: Path) -> Path:
    """Write questions with choices."""
    rows = [
        {"question": f"{i}+{j}=", "choices": [str(i + j), f"{i + j + 1} no", "z"], "answer": (i + j) % 3}
        for i, j in SUMS
    ]
    return write_rows(folder / "choices.jsonl", rows)


def answers(folder: Path) -> Path:
    """Write questions with answers."""
    return write_rows(folder / "answers.jsonl", [{"question": f"{i}+{j}=", "answer": str(i + j)} for i, j in SUMS])


def texts(folder: Path) -> Path:
    """Write plain texts."""
    return write_rows(folder / "texts.jsonl", [{"text": f"{i} plus {j} is {i + j} ok"} for i, j in SUMS[:9]])


def task_files(folder: Path) -> list[str]:
    """Write a task of each kind of request; return the files."""
    found = []
    for name, file, rest in (
        ("local_choices", choices(folder), CHOICE),
        ("local_answers", answers(folder), ANSWER),
        ("local_texts", texts(folder), TEXT + "\nnum_fewshot: 0"),
    ):
        path = folder / f"{name}.yaml"
        path.write_text(TASK.format(name=name, file=file, rest=rest))
        found.append(str(path))
    return found
