"""`python -m tests.trainers.rl.count_dialogues [--dialogues N] [--first_seed S]`: writes N dialogues with each kind of
template, and counts how often the tokens that are trained on are not those that were sampled. The default of 10,000
dialogues takes one core an hour and a half."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.trainers.rl.test_sampled_tokens import KINDS, faults_of

BLOCK = 40
"""Dialogues of one seed: few enough that their tokens fit the processor's caches."""


def main() -> int:
    """Print the counts; return 1 if any tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", type=int, default=10_000)
    parser.add_argument("--first_seed", type=int, default=1, help="each block of dialogues has a seed of its own")
    asked = parser.parse_args()
    found: Counter[str] = Counter()
    for seed, start in enumerate(range(0, asked.dialogues, BLOCK), asked.first_seed):
        count = min(BLOCK, asked.dialogues - start)
        for name in KINDS:
            faults = faults_of(name, count, seed)
            found.update(faults)
            if faults.keys() != {"turns"}:
                print(f"{name}, seed {seed}: {dict(faults)}", flush=True)
        done = (start + count) * len(KINDS)
        print(f"{done:,} dialogues, {found['turns']:,} turns, {found.total() - found['turns']:,} faults", flush=True)
    return int(found.keys() != {"turns"})


if __name__ == "__main__":
    raise SystemExit(main())
