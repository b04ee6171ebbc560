"""The kinds of problems that classifiers of texts are trained on, by transformers' names."""

from __future__ import annotations

SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)


def default_problem_type(labels: int) -> str:
    """Return the kind of problem that transformers takes for so many labels."""
    return REGRESSION if labels == 1 else SINGLE_LABEL
