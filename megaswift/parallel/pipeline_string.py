"""Megatron's pipeline layout strings: `Ett|(tt|)*6L`, with stages separated by bars.

Owns the syntax (that of Megatron-Core's `PipelineParallelLayerLayout`): `E` embedding, `t` a transformer layer, `m` a
multi-token-prediction layer, `L` the loss; `x*n` and `(...)*n` repeat; commas are ornament. Leaves out what the stages
mean for a given model (`pipeline_split.py`).
"""

from __future__ import annotations

import re

from megaswift.errors import LayoutError, Problem

LETTERS = {"E": "embedding", "t": "transformer layer", "m": "multi-token-prediction layer", "L": "loss"}

_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def _repeat(match: re.Match[str]) -> str:
    return match.group(1) * int(match.group(2))


def parse_layout_string(text: str) -> list[str]:
    """One string of letters a stage, in the order in which a sample passes them; LayoutError for an unknown letter."""
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATS:
        unrolled = pattern.sub(_repeat, unrolled)
    stages = unrolled.split("|")
    unknown = sorted(set("".join(stages)) - set(LETTERS))
    if unknown:
        letters = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
        rule = f"has {' '.join(map(repr, unknown))}; allowed are {letters}, | * ( ) and commas"
        raise LayoutError(Problem(f"--pipeline_layout {text}", rule))
    return stages
