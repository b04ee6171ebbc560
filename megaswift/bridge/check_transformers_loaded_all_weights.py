"""Refuses a model for which transformers did not find every weight: it initializes the others at random, with a warning
at most."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megaswift.errors import Problem, WeightsError

LOADING_INFO = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Arguments with which `from_pretrained` returns a pair: the model, and what it did not load."""
NAMED = 12
"""Problems, and missing names of one, that a message names."""


def check_all_weights_loaded(what: str, loading_info: Mapping[str, Any], new: Collection[str] = ()) -> None:
    """Raises WeightsError for weights of other shapes and for missing ones; those in `new` may be missing. `what`: the
    folder or option that brought the files."""
    problems = [
        Problem(f"{what}, tensor {name}", f"has shape {list(stored)}, but config.json requires {list(wanted)}")
        for name, stored, wanted in sorted(loading_info["mismatched_keys"])
    ]
    missing = sorted(set(loading_info["missing_keys"]) - {*new, *(key[0] for key in loading_info["mismatched_keys"])})
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        problems.append(Problem(what, f"transformers finds no weights for {', '.join(missing[:NAMED])}{more}"))
    if problems:
        raise WeightsError(problems[:NAMED])
