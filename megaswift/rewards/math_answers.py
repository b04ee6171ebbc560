"""Whether an answer equals a solution mathematically, by math-verify with the settings of TRL's `accuracy_reward`.

Runs in the runner, one process a pair: what the library parses may take for ever or all memory (`9^{9^{9^9}}`), and its
own clock is a signal that only a main thread gets. The answer is read as LaTeX only; math-verify hands other forms to
sympy's parser, which calls `eval`.
"""

from __future__ import annotations

from logging import ERROR, getLogger
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

WARMING = (
    ("$\\frac{1}{2}$", "\\boxed{0.5}"),
    ("5", "\\boxed{\\sqrt{25}}"),
    ("$\\{1,2\\}$", "\\boxed{2,1}"),
    ("$(1,2)$", "\\boxed{(1,2)}"),
    ("$x^2=4$", "\\boxed{x=2}"),
    ("$\\begin{pmatrix}1\\\\2\\end{pmatrix}$", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}"),
    ("$10\\%$", "\\boxed{0.1}"),
    ("$\\sin x$", "\\boxed{\\cos x}"),
    ("$1<x\\le2$", "\\boxed{(1,2]}"),
)


def math_extraction_settings() -> list[Any]:
    """A box first; else LaTeX after words like "the answer is"."""
    normal = NormalizationConfig(units=True)
    return [
        LatexExtractionConfig(normalization_config=normal, boxed_match_priority=0, try_extract_without_anchor=False)
    ]


def answer_verdict(solution: str, completion: str) -> float | None:
    """1.0 for an answer that equals the solution, else 0.0; None: the solution cannot be parsed."""
    gold = parse(solution, parsing_timeout=None)  # the sandbox has the clock
    if not gold:
        return None
    answer = parse(
        completion, extraction_config=math_extraction_settings(), extraction_mode="first_match", parsing_timeout=None
    )
    return float(verify(gold, answer, timeout_seconds=None))


def preload_lazy_imports() -> None:
    """Imports what the libraries import late, so that children find it there."""
    for name in ("math_verify.parser", "math_verify.grader"):
        getLogger(name).setLevel(ERROR)  # notes that their clocks are off
    for solution, completion in WARMING:
        answer_verdict(solution, completion)
