"""Write the bundled conversations: every fact asked in ten ways, some of the questions kept for the held-out file.

    python scripts/quickstart/make_data.py FOLDER

Deterministic. A held-out question is a fact in a wording that training never shows for it; both are known from others.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from facts import KINDS

HELD_OUT = 100


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


def write(path: Path, pairs: list[tuple[str, str]]) -> None:
    """One JSON line a conversation, in the `messages` format."""
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """train.jsonl and heldout.jsonl."""
    rng = random.Random(20)
    train, held_out = questions(rng)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", train)
    write(folder / "heldout.jsonl", held_out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
