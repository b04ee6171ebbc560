"""Scores of answers, and intervals by the bootstrap over questions. No torch.

Exact match and F1 are SQuAD's (Rajpurkar et al., 2016): case, punctuation, articles and spaces do not count. An
interval is the percentile bootstrap (Efron, 1979); two models are compared on the same resampled questions.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
LEVEL = 0.95
CHUNK_CELLS = 4_000_000
"""Counts of resampled questions that are in memory at a time."""
Weighted = tuple[float, float]
"""What a question adds to the two sums of which a score is a function: (value, weight)."""


def normalized_answer(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and repeated spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer is one of the references after normalization, else 0."""
    return float(normalized_answer(answer) in {normalized_answer(reference) for reference in references})


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best F1 of words over the references."""
    return max(_f1(normalized_answer(answer).split(), normalized_answer(r).split()) for r in references)


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def perplexity_of(mean_logprob: Any) -> Any:
    """Return exp(-x): the perplexity of a mean log-probability."""
    return np.exp(-mean_logprob)


def bits_of(mean_logprob: Any) -> Any:
    """Return -x / ln 2: bits of a mean log-probability."""
    return -mean_logprob / math.log(2)


def same(value: Any) -> Any:
    """Return the value."""
    return value


TRANSFORMS: Mapping[str, Callable[[Any], Any]] = {"mean": same, "perplexity": perplexity_of, "bits": bits_of}
"""How a score follows from the ratio of its two sums."""


@dataclass(frozen=True)
class Interval:
    """A score with the interval that holds it with probability 0.95."""

    value: float
    low: float
    high: float


def _resampled_sums(items: np.ndarray, iterations: int, seed: int) -> Iterator[np.ndarray]:
    """Yield [some iterations, columns]: the sums of the items' columns over resampled questions."""
    rng = np.random.default_rng(seed)
    count = len(items)
    share = np.full(count, 1 / count)
    left = iterations
    while left:
        size = min(left, max(1, CHUNK_CELLS // count))
        yield rng.multinomial(count, share, size=size) @ items
        left -= size


def _ratio(sums: np.ndarray, transform: Callable[[Any], Any]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(transform(sums[..., 0] / sums[..., 1]))


def _ends(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(items: Sequence[Weighted], transform: str, iterations: int, seed: int) -> Interval:
    """Compute a score and its interval.

    Args:
        items: (value, weight) of each question; the score is a function of the sum of values over the sum of weights.
        transform: The function, a key of `TRANSFORMS`.
        iterations: Resamplings.
        seed: Seed of the resampling.
    """
    table = np.asarray(items, dtype=np.float64)
    change = TRANSFORMS[transform]
    resampled = np.concatenate([_ratio(sums, change) for sums in _resampled_sums(table, iterations, seed)])
    return Interval(float(_ratio(table.sum(0), change)), *_ends(resampled))


@dataclass(frozen=True)
class Difference:
    """A score of one model less that of another, over the questions that both answered."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided: twice the share of resamplings in which the difference has the other sign, or none."""
    questions: int


def paired_bootstrap(
    first: Sequence[Weighted], second: Sequence[Weighted], transform: str, iterations: int, seed: int
) -> Difference:
    """Compare two models on the same questions, in the same order: first less second."""
    assert len(first) == len(second), "the same questions"
    change = TRANSFORMS[transform]
    table = np.concatenate([np.asarray(first, np.float64), np.asarray(second, np.float64)], axis=1)

    def difference(sums: np.ndarray) -> np.ndarray:
        return _ratio(sums[..., :2], change) - _ratio(sums[..., 2:], change)

    resampled = np.concatenate([difference(sums) for sums in _resampled_sums(table, iterations, seed)])
    tails = min(np.mean(resampled <= 0), np.mean(resampled >= 0))
    return Difference(float(difference(table.sum(0))), *_ends(resampled), min(1.0, 2 * float(tails)), len(table))
