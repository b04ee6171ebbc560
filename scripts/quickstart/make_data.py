"""Write the bundled conversations: every fact asked in ten ways, some of the questions kept for the held-out file.

    python scripts/quickstart/make_data.py FOLDER

Deterministic. A held-out question is a fact in a wording that training never shows for it; both are known from others.
FOLDER/preference holds pairs of the same facts: the right answer is chosen, and one that is right for another thing of
the same kind is rejected. Held out are pairs of facts in a wording that no other pair has for them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from facts import KINDS

HELD_OUT = 100
WORDINGS = 5
"""Pairs of a fact; one of them is held out."""


def questions(rng: random.Random) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(train, held out) question-answer pairs; at most one wording of a fact is held out."""
    train, held_out = [], []
    for kind in KINDS:
        for x, y in kind.pairs.items():
            asked = [(q.format(x=x), y) for q in kind.questions]
            held_out.append(asked.pop(rng.randrange(len(asked))))
            train.extend(asked)
    rng.shuffle(held_out)
    train.extend(held_out[HELD_OUT:])
    rng.shuffle(train)
    return train, held_out[:HELD_OUT]


def write(path: Path, asked: list[tuple[str, str]]) -> None:
    """One JSON line a conversation, in the `messages` format."""
    write_rows(path, [conversation(q, a) for q, a in asked])


def conversation(question: str, answer: str) -> dict[str, Any]:
    """A row of one round."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON line a row."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def pairs(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, held out) rows of preferences, in the form `messages` and `rejected_response`."""
    train, held_out = [], []
    for kind in KINDS:
        for x, y in kind.pairs.items():
            others = sorted(set(kind.pairs.values()) - {y})
            asked = rng.sample(kind.questions, WORDINGS)
            rows = [{**conversation(q.format(x=x), y), "rejected_response": rng.choice(others)} for q in asked]
            held_out.append(rows.pop())
            train.extend(rows)
    rng.shuffle(held_out)
    rng.shuffle(train)
    return train, held_out[:HELD_OUT]


def main(folder: Path) -> None:
    """train.jsonl and heldout.jsonl, and the same of pairs."""
    rng = random.Random(20)
    train, held_out = questions(rng)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", train)
    write(folder / "heldout.jsonl", held_out)
    (folder / "preference").mkdir(exist_ok=True)
    for name, rows in zip(("train", "heldout"), pairs(random.Random(21)), strict=True):
        write_rows(folder / "preference" / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
