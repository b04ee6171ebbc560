"""The completions of report.html: some of each step, as much of completions.jsonl as a page can hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SAMPLES = 12
"""Completions of a step."""
MOST_BYTES = 4 * 2**20
"""Bytes of completions.jsonl that go into the page, if one step has not more."""
LONGEST = 20_000
"""Characters of a text."""
_STEP = re.compile(rb'\{"step": (\d+)')


def completions_by_step(path: Path) -> dict[str, Any]:
    """Return the first SAMPLES completions of each step, or of evenly spaced steps where all of them are too many.

    The file is read line by line: it may be larger than memory.

    Returns:
        `steps`, a list of `{"step", "rows"}` in order, and `of`, the number of steps in the file.
    """
    places = _places(path)
    steps = sorted(places)
    total = sum(length for lines in places.values() for _, length in lines)
    most = len(steps) if total <= MOST_BYTES else max(1, len(steps) * MOST_BYTES // total)
    chosen = [steps[-1 - i * (len(steps) - 1) // max(most - 1, 1)] for i in reversed(range(most))] if steps else []
    shown = []
    if chosen:
        with path.open("rb") as file:
            for step in chosen:
                rows = [row for offset, _ in places[step] if (row := _row(file, offset)) is not None]
                shown.append({"step": step, "rows": rows})
    return {"steps": shown, "of": len(steps)}


def _places(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Step -> offset and length of its first lines."""
    places: dict[int, list[tuple[int, int]]] = {}
    if not path.exists():
        return places
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if match := _STEP.match(line):
                lines = places.setdefault(int(match[1]), [])
                if len(lines) < SAMPLES:
                    lines.append((offset, len(line)))
            offset += len(line)
    return places


def _row(file: Any, offset: int) -> dict[str, Any] | None:
    """A line as the page shows it; None where a crash cut it short."""
    file.seek(offset)
    try:
        line = json.loads(file.readline())
    except ValueError:
        return None
    rewards = {name.removeprefix("rewards/"): value for name, value in line.items() if name.startswith("rewards/")}
    row = {
        "prompt": _text(line.get("prompt")),
        "completion": _text(line.get("completion")),
        "reward": line.get("reward"),
        "rewards": rewards,
        "advantage": line.get("advantage"),
    }
    return row | {name: line[name] for name in ("token_texts", "token_logprobs", "token_advantages") if name in line}


def _text(message: Any) -> str:
    """A text, or the messages of a conversation one below the other."""
    if isinstance(message, list):
        message = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in message)
    text = str(message)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} more characters)"
