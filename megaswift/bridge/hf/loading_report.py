"""What transformers did not load: weights that the files lack, which it initializes at random, and tensors of the files
that the model does not use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megaswift import log
from megaswift.errors import Problem, WeightsError

LOADING_INFO = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Arguments with which `from_pretrained` returns a pair: the model, and what it did not load."""
NAMED = 12
"""Problems, and names of one, that a message names."""


def check_all_weights_loaded(what: str, loading_info: Mapping[str, Any], new: Collection[str] = ()) -> None:
    """Raises WeightsError for weights of other shapes and for missing ones; those in `new` may be missing. `what`: the
    folder or option that brought the files."""
    shapes = [
        Problem(f"{what}, tensor {name}", f"has shape {list(stored)}, but config.json requires {list(wanted)}")
        for name, stored, wanted in sorted(loading_info["mismatched_keys"])
    ]
    names = sorted(set(loading_info["missing_keys"]) - {*new, *(key[0] for key in loading_info["mismatched_keys"])})
    missing = [Problem(what, f"transformers finds no weights for {_first_names(names)}")] if names else []
    if shapes or missing:
        raise WeightsError([*shapes[:NAMED], *missing])


def warn_of_unused_weights(what: str, names: Collection[str], scored: bool) -> None:
    """Warn of tensors in the files that the model does not use. `scored`: a model with a score in place of its output
    layer."""
    unused = sorted(name for name in names if not (scored and name.split(".")[-2:-1] == ["lm_head"]))
    if unused:
        count = log.count_text(len(unused), "tensor")
        log.warn(f"{what}: {count} of its files, not used by this model, will not be exported: {_first_names(unused)}")


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
