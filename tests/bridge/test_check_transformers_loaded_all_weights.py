"""What transformers did not load is refused, by name."""

from __future__ import annotations

import pytest

from megaswift.bridge.check_transformers_loaded_all_weights import check_all_weights_loaded
from megaswift.errors import WeightsError


def test_all_are_there_but_a_new_one() -> None:
    check_all_weights_loaded(
        "--model m", {"missing_keys": {"score.weight"}, "mismatched_keys": set()}, new=("score.weight",)
    )


def test_missing_ones_are_counted_and_shapes_told_once() -> None:
    """A name whose shape differs is not called missing, too."""
    lost = {f"w{i:02}" for i in range(15)}
    found = {"missing_keys": lost | {"b"}, "mismatched_keys": {("b", (2, 3), (4, 3)), ("a", (1,), (5,))}}
    with pytest.raises(WeightsError) as caught:
        check_all_weights_loaded("--model m", found)
    assert [str(p) for p in caught.value.problems] == [
        "--model m, tensor a: has shape [1], but config.json requires [5]",
        "--model m, tensor b: has shape [2, 3], but config.json requires [4, 3]",
        f"--model m: transformers finds no weights for {', '.join(sorted(lost)[:12])} and 3 more",
    ]
