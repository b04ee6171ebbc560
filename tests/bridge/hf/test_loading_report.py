"""What transformers did not load is refused, by name."""

from __future__ import annotations

import pytest

from megaswift.bridge.hf.loading_report import check_all_weights_loaded, warn_of_unused_weights
from megaswift.errors import WeightsError


def test_only_a_new_one_may_be_missing() -> None:
    found = {"missing_keys": {"score.weight"}, "mismatched_keys": set()}
    check_all_weights_loaded("--model m", found, new=("score.weight",))
    with pytest.raises(WeightsError, match=r"--model m: transformers finds no weights for score\.weight$"):
        check_all_weights_loaded("--model m", found)


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


def test_many_other_shapes_do_not_hide_missing_ones() -> None:
    found = {"missing_keys": {"lost"}, "mismatched_keys": {(f"w{i:02}", (1,), (2,)) for i in range(30)}}
    with pytest.raises(WeightsError) as caught:
        check_all_weights_loaded("--model m", found)
    *shapes, last = map(str, caught.value.problems)
    assert len(shapes) == 12 and last == "--model m: transformers finds no weights for lost"


@pytest.mark.parametrize(
    ("names", "scored", "said"),
    [
        ((), False, ""),
        (("b", "a"), False, "--model m: 2 tensors of its files, not used by this model, will not be exported: a, b"),
        (("lm_head.weight",), False, "1 tensor of its files, not used by this model, will not be exported: lm_head.w"),
        (("lm_head.weight", "language_model.lm_head.weight"), True, ""),
        (("lm_head.weight", "x"), True, "1 tensor of its files, not used by this model, will not be exported: x"),
    ],
)
def test_unused_ones_are_told(
    names: tuple[str, ...], scored: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score takes the place of an output layer: that one is no loss."""
    warn_of_unused_weights("--model m", names, scored)
    text = capsys.readouterr().err
    assert said in text and bool(text) == bool(said)
