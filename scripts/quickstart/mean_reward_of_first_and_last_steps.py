"""Mean reward of a run's completions: of the first generation, and of the last ten.

python scripts/quickstart/mean_reward_of_first_and_last_steps.py completions.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAST = 10


def by_step(path: Path) -> dict[int, list[float]]:
    """The rewards of each generation, by the step that was the first to use it."""
    found: dict[int, list[float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).append(row["reward"])
    return found


def mean(values: list[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def main(path: Path) -> None:
    """Two numbers."""
    steps = by_step(path)
    last = [reward for step in sorted(steps)[-LAST:] for reward in steps[step]]
    print(f"mean training reward, first generation: {mean(steps[min(steps)]):.2f}")
    print(f"mean training reward, last {LAST} generations: {mean(last):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
