"""Errors of transformers and PEFT as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from megaswift.errors import Problem, WeightsError, first_line

REFUSALS = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    ArithmeticError,
    StrictDataclassError,
)
"""What transformers raises for a model that it cannot load."""


@contextmanager
def transformers_errors_as_ours(what: str) -> Iterator[None]:
    """A WeightsError about `what` where transformers or PEFT refuse it."""
    try:
        yield
    except REFUSALS as error:
        fix = (
            "give --trust_remote_code true if you trust the code in the model folder"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise WeightsError(Problem(what, f"transformers cannot load it: {first_line(error)}", fix)) from None
