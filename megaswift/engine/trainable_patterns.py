"""What is wrong with `--freeze_parameters` and `--trainable_parameters`, the same with every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaswift.errors import Problem


def unmatched_pattern_problem(option: str, pattern: str, names: Iterable[str]) -> Problem:
    """Report a pattern that matches no weight; `names` are some of the model's."""
    return Problem(f"--{option} {pattern}", f"matches no weight; names are like {', '.join(names)}")


def nothing_trains_problem(patterns: Sequence[str]) -> Problem:
    """Report that every weight is frozen."""
    fix = "--trainable_parameters PATTERN, for the weights to train, or fewer patterns"
    return Problem(f"--freeze_parameters {' '.join(patterns)}", "freezes all weights: nothing would be trained", fix)
