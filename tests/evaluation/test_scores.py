"""Exact match and F1 are SQuAD's as a task of lm-evaluation-harness has them;
intervals are those of scipy's bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megaswift.evaluation.scores import bootstrap, exact_match, f1, paired_bootstrap

PAIRS = [
    ("The cat, sat.", "cat sat"),
    ("an apple a day", "apple day"),
    ("", "cat"),
    ("Paris", "paris!"),
    ("in Paris in spring", "Paris in the spring time"),
    ("yes", "no"),
    ("a a b", "b b a"),
]


@pytest.mark.parametrize(("answer", "reference"), PAIRS)
def test_answers_as_squad_scores_them(answer: str, reference: str) -> None:
    from lm_eval.tasks.tydiqa.utils import exact_match_score, f1_score  # its import takes a second

    assert exact_match(answer, [reference]) == exact_match_score(answer, reference, "en")
    assert f1(answer, [reference]) == pytest.approx(f1_score(answer, reference, "en"), abs=1e-15)


def test_no_answer_is_right_where_none_is_expected() -> None:
    """SQuAD 2.0's rule, also where only articles are left out."""
    assert f1("", [""]) == f1("the", [""]) == exact_match("the", [""]) == 1
    assert f1("", ["a cat"]) == f1("cat", ["the"]) == 0


def test_the_best_reference_counts() -> None:
    assert exact_match("two", ["2", "two"]) == 1 and f1("two dogs", ["cats", "two cats", "dogs two"]) == 1


def test_an_interval_is_that_of_scipy() -> None:
    """Percentile bootstrap of a mean; both are drawn, so equal up to the spread of 20,000 resamplings."""
    from scipy import stats

    values = np.random.default_rng(1).normal(size=80)
    found = bootstrap([(v, 1) for v in values], "mean", 20000, seed=2)
    low, high = stats.bootstrap(
        (values,), np.mean, n_resamples=20000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(low, abs=0.01) and found.high == pytest.approx(high, abs=0.01)


def test_a_ratio_is_resampled_by_question() -> None:
    """Perplexity is no mean of perplexities: both sums are of the resampled texts."""
    items = [(-2.0, 1), (-30.0, 30)]
    found = bootstrap(items, "perplexity", 4000, seed=0)
    assert found.value == pytest.approx(math.exp(32 / 31))
    assert found.low == pytest.approx(math.exp(1)) and found.high == pytest.approx(math.exp(2))
    bits = bootstrap(items, "bits", 4000, seed=0)
    assert bits.value == pytest.approx(32 / 31 / math.log(2))


def test_two_models_are_compared_on_the_same_questions() -> None:
    """One is right wherever the other is, and on one question more: no resampling says the opposite, though the
    intervals of the two overlap widely."""
    first = [(float(i < 11), 1.0) for i in range(20)]
    second = [(float(i < 10), 1.0) for i in range(20)]
    found = paired_bootstrap(first, second, "mean", 20000, seed=0)
    none_drawn = (19 / 20) ** 20
    assert found.value == pytest.approx(0.05) and found.low == 0
    assert found.p == pytest.approx(2 * none_drawn, abs=0.02) and found.questions == 20
    other = paired_bootstrap(second, first, "mean", 20000, seed=0)
    assert (other.value, other.high) == (-found.value, 0)


def test_equal_models_do_not_differ() -> None:
    items = [(float(i % 2), 1.0) for i in range(9)]
    found = paired_bootstrap(items, items, "mean", 100, seed=0)
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)
