"""Which completions become rows, and pass@k against an enumeration of all draws."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from megaswift.data.formats import recognize_format
from megaswift.rejection.journal import PromptScores, SampledCompletion
from megaswift.rejection.options.sampling import SelectionOptions
from megaswift.rejection.selection import SampledPrompt, kept, pair, pass_at_k, rows_of

ASKED = ({"role": "user", "content": "q"},)


def prompt(rewards: list[float | None] | None, texts: str = "abcdef", cut: str = "", content: Any = ASKED) -> Any:
    """A prompt whose completions are the letters of `texts`; those in `cut` were cut off."""
    completions = [SampledCompletion(text, (1,), text not in cut) for text in texts]
    scores = None if rewards is None else PromptScores({"r": rewards}, rewards)
    return SampledPrompt(content, {}, None, completions, scores)


@pytest.mark.parametrize("n, passed", [(5, 0), (5, 1), (5, 3), (5, 5), (8, 2)])
def test_pass_at_k_is_the_share_of_draws_with_one_that_passes(n: int, passed: int) -> None:
    for k in range(1, n + 1):
        draws = list(combinations(range(n), k))
        share = sum(any(one < passed for one in draw) for draw in draws) / len(draws)
        assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([0, 2, 1], {}, [1]),
        ([0, 2, 1], {"num_best": 2}, [1, 2]),
        ([0, 2, 1], {"num_best": 3, "reward_threshold": 1}, [1, 2]),
        ([0, 2, 1], {"reward_threshold": 3}, []),
        ([1, 2, 2], {}, [1]),  # the first of equals
        ([None, 0, None], {"num_best": 3}, [1]),  # no function applies to the others
        ([-1, -2, -3], {}, [0]),
        (None, {}, [0, 1, 2]),
        (None, {"num_best": 2}, [0, 1]),
        ([1, 1, 0], {"easy_query_threshold": 0.5}, []),
        ([1, 0, 0], {"easy_query_threshold": 0.5}, [0]),
        ([0.5, 0.5, 0.5], {"easy_query_threshold": 0.5, "pass_threshold": 0.5}, []),
    ],
)
def test_kept(rewards: Any, options: dict[str, Any], expected: list[int]) -> None:
    assert kept(prompt(rewards, "abc"), SelectionOptions(**options)) == expected


def test_a_text_is_kept_once_and_a_cut_one_only_when_asked_for() -> None:
    assert kept(prompt([1, 1, 1], "aba"), SelectionOptions(num_best=3)) == [0, 1]
    assert kept(prompt([3, 2, 1], "abc", cut="a"), SelectionOptions()) == [1]
    assert kept(prompt([3, 2, 1], "abc", cut="a"), SelectionOptions(keep_truncated=True)) == [0]
    assert kept(prompt([3, 2], " b"), SelectionOptions()) == [1]  # no text


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([0, 2, 1], {}, (1, 0)),
        ([1, 1, 1], {}, None),
        ([0, 2, 1], {"min_margin": 2}, None),
        ([0, 2, 1], {"min_margin": 1.5}, (1, 0)),
        ([0, 2, 1], {"reward_threshold": 3}, None),
        ([None, 2, None], {}, None),
    ],
)
def test_pairs(rewards: Any, options: dict[str, Any], expected: Any) -> None:
    assert pair(prompt(rewards, "abc"), SelectionOptions(output_format="preference", **options)) == expected


@pytest.mark.parametrize("content", [ASKED, "q"])
def test_rows_are_read_by_training(content: Any) -> None:
    """The question and the answers come back from the formats of sft and dpo."""
    asked = prompt([0, 2, 1], "abc", content=content)
    (row,) = rows_of(asked, SelectionOptions(), {"solution": "s"})
    assert row["reward"] == 2 and row["solution"] == "s"
    assert texts_of(recognize_format(row, "sft").parse(row)) == ["qb" if content == "q" else "b"]
    (row,) = rows_of(asked, SelectionOptions(output_format="preference"), {"solution": "s"})
    example: Any = recognize_format(row, "dpo").parse(row)
    found = [text for sample in example.samples for text in texts_of(sample)]
    assert found == (["qb", "qa"] if content == "q" else ["b", "a"])
    assert (row["chosen_reward"], row["rejected_reward"]) == (2, 0)


def texts_of(sample: Any) -> list[str]:
    """The text, or the answers of a conversation."""
    if sample.text is not None:
        return [sample.text]
    return [message["content"] for message in sample.messages if message["role"] == "assistant"]
