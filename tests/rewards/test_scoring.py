"""Calling reward functions: what they get, what they may return, several at once.

Covers: megaswift/rewards/scoring.py.
"""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.errors import RewardError
from megaswift.rewards.format_and_length_rewards import PerCompletionReward
from megaswift.rewards.scoring import (
    RewardInput,
    RewardScores,
    missing_reward_column_problems,
    score_rewards,
)
from megaswift.rewards.user_function import AsyncUserFunction, UserFunction
from tests.rewards.samples import judged, said

THREE = [judged("a", answer=1), judged("bb", answer=2), judged("ccc")]


def returning(values: Any, name: str = "mine") -> UserFunction:
    return UserFunction(name, lambda **_: values, None, frozenset())


def score(*functions: Any, weights: tuple[float, ...] = (), samples: list[RewardInput] = THREE) -> RewardScores:
    return score_rewards(functions, weights or (1.0,) * len(functions), samples)


def test_the_total_is_the_weighted_sum() -> None:
    rewards = score(
        PerCompletionReward("length", lambda s: float(len(s.text))), returning([1, 0, -1]), weights=(0.5, 3.0)
    )
    assert rewards == RewardScores({"length": [1.0, 2.0, 3.0], "mine": [1.0, 0.0, -1.0]}, [3.5, 1.0, -1.5])


@pytest.mark.parametrize(
    "values",
    [
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.float32),
        torch.tensor([1.0, 2.0, 3.0]),
        [np.float64(1), np.int32(2), 3.0],
        [torch.tensor(1.0), Fraction(2), np.array(3)],
    ],
    ids=["tuple", "ints", "floats", "tensor", "scalars", "mixed"],
)
def test_numbers_of_any_library_become_floats(values: Any) -> None:
    found = score(returning(values)).per_function["mine"]
    assert found == [1.0, 2.0, 3.0] and all(type(value) is float for value in found)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (None, "returned None, not a list of 3 numbers"),
        (1.0, "returned 1.0 (float), not a list"),
        ("123", "(str), not a list"),
        ({"a": 1}, "(dict), not a list"),
        pytest.param(iter([1, 2, 3]), "not a list of 3 numbers", id="iterator"),
        (torch.tensor(1.0), "(Tensor), not a list"),
        ([1.0, 2.0], "returned 2 values for 3 samples"),
        ([1.0] * 4, "returned 4 values for 3 samples"),
        ([], "returned 0 values"),
        ([1.0, 2.0, "3"], "returned '3' (str) for sample 2 of 3, the completion 'ccc'"),
        ([math.nan, 0.0, 0.0], "returned nan for sample 0"),
        ([0.0, math.inf, 0.0], "returned inf for sample 1"),
        ([0.0, 0.0, -math.inf], "returned -inf for sample 2"),
        (np.array([0.0, np.nan, 0.0]), "returned nan for sample 1"),
        ([1.0, [2.0], 3.0], "returned 1 numbers for the 2 tokens of sample 1 of 3, the completion 'bb'"),
        (np.ones((3, 1)), "returned 1 numbers for the 2 tokens of sample 1"),
        ([1.0, [], 3.0], "returned 0 numbers for the 2 tokens"),
        ([1.0, [2.0, None], 3.0], "returned None (NoneType) for token 1 of sample 1 of 3, the completion 'bb'"),
        ([1.0, [2.0, "3"], 3.0], "returned '3' (str) for token 1 of sample 1"),
        ([[math.nan], 1.0, 2.0], "returned nan for token 0 of sample 0"),
        ([1.0, [2.0, [3.0]], 3.0], "returned [3.0] (list) for token 1 of sample 1"),
        ([1j, 0.0, 0.0], "returned 1j (complex)"),
        ([10**400, 0, 0], "returned inf"),
    ],
    ids=str,
)
def test_what_is_no_reward_is_told_with_function_and_sample(values: Any, told: str) -> None:
    with pytest.raises(RewardError) as error:
        score(returning(values, "score_it"))
    assert told in str(error.value) and "--reward_funcs score_it" in str(error.value) and "try: " in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        [True, False, True],
        [True, 0.0, 1],
        np.array([True, False, True]),
        [np.True_, np.False_, np.True_],
        torch.tensor([True, False, True]),
        [torch.tensor(True), torch.tensor(False), 1.0],
    ],
    ids=["bools", "mixed", "array", "numpy", "tensor", "tensors"],
)
def test_truth_values_are_1_and_0(values: Any) -> None:
    found = score(returning(values)).per_function["mine"]
    assert found == [1.0, 0.0, 1.0] and all(type(value) is float for value in found)


def test_none_is_left_out_of_the_sum_as_trl_has_it() -> None:
    """The weighted sum of what is there (`nansum`); no reward where nothing is."""
    given = {"a": [1.0, None, None], "b": [None, 2.0, None]}
    rewards = score(*(returning(v, n) for n, v in given.items()), weights=(0.5, 3.0))
    table = torch.tensor([[math.nan if v is None else v for v in column] for column in given.values()]).T
    assert rewards.total[:2] == (table * torch.tensor([0.5, 3.0])).nansum(1).tolist()[:2] == [0.5, 6.0]
    assert math.isnan(rewards.total[2]) and math.isnan(rewards.per_function["a"][1])
    mixed = score(returning([None, [1.0, 2.0], None], "tokens"), returning([1.0, None, None], "whole"))
    assert mixed.total[:2] == [1.0, 3.0] and math.isnan(mixed.total[2]) and mixed.tokens == [None, (1.0, 2.0), None]


def test_a_function_that_raises_is_told_once_with_the_users_own_lines() -> None:
    def broken(completions: list[str]) -> list[float]:
        return [1 / (len(text) - 2) for text in completions]

    with pytest.raises(RewardError) as error:
        score(UserFunction("broken", broken, frozenset({"completions"}), frozenset()))
    text = str(error.value)
    assert "--reward_funcs broken: failed on samples 0 to 2, the first with the completion" in text
    assert "ZeroDivisionError" in text and "lists of messages" not in text
    assert "return [1 / (len(text) - 2)" in text and "rewards/scoring.py" not in text and "checked.py" not in text


def test_a_function_for_texts_on_conversations_is_told_what_completions_are() -> None:
    def strips(completions: list[str]) -> list[float]:
        return [float(text.strip() == "4") for text in completions]

    said = [{"role": "assistant", "content": "4"}]
    sample = RewardInput([{"role": "user", "content": "2+2?"}], said, [5], True)
    with pytest.raises(RewardError, match=r"has no attribute 'strip'\n.*lists of messages.*completion\[-1\]"):
        score_rewards([UserFunction("strips", strips, frozenset({"completions"}), frozenset())], [1.0], [sample])


def test_prompts_completions_and_columns_arrive_as_lists() -> None:
    got: dict[str, Any] = {}

    def keep(**given: Any) -> list[float]:
        got.update(given)
        return [0.0] * len(given["prompts"])

    score(UserFunction("keep", keep, None, frozenset()))
    assert got == {
        "prompts": ["Q"] * 3,
        "completions": ["a", "bb", "ccc"],
        "completion_ids": [[97], [98, 98], [99, 99, 99]],
        "completion_mask": [[1], [1, 1], [1, 1, 1]],
        "answer": [1, 2, None],
    }
    score(UserFunction("keep", keep, None, frozenset()), samples=[said("hi")])
    assert got["prompts"] == [[{"role": "user", "content": "Q"}]] and got["completions"] == [
        [{"role": "assistant", "content": "hi"}]
    ]


def test_async_functions_wait_together_and_keep_one_loop() -> None:
    inside, loops = asyncio.Event(), set()

    async def first(**_: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        await asyncio.wait_for(inside.wait(), 5)
        return [1.0] * 3

    async def second(**_: Any) -> list[float]:
        inside.set()
        return [2.0] * 3

    functions = [AsyncUserFunction(f.__name__, f, None, frozenset()) for f in (first, second)]
    rewards = score(*functions, returning([4, 4, 4], "plain"))
    assert list(rewards.per_function) == ["first", "second", "plain"] and rewards.total == [7.0] * 3
    score(*functions)
    assert len(loops) == 1

    async def wrong(**_: Any) -> list[Any]:
        return [0.0, "x", 0.0]

    with pytest.raises(RewardError, match="--reward_funcs wrong: returned 'x'"):
        score(AsyncUserFunction("wrong", wrong, None, frozenset()))


@pytest.mark.parametrize(
    "values",
    [
        [1, [2, 3], 4],
        [np.float32(1), np.array([2, 3]), 4.0],
        [torch.tensor(1), torch.tensor([2.0, 3.0]), 4],
        (1, (2.0, 3), 4),
    ],
    ids=str,
)
def test_rewards_of_tokens_add_up_and_keep_their_places(values: Any) -> None:
    """What another function says of the whole completion stands at its last token."""
    rewards = score(returning(values), returning([10, 20, 30], "whole"), weights=(0.5, 2.0))
    assert rewards == RewardScores(
        {"mine": [1.0, 5.0, 4.0], "whole": [10.0, 20.0, 30.0]}, [20.5, 42.5, 62.0], [None, (1.0, 41.5), None]
    )


def test_rewards_of_tokens_are_of_those_that_the_model_wrote() -> None:
    talk = RewardInput("Q", "abc", (97, 98, 99), True, {}, (True, False, True))
    rewards = score(returning([[1, 2]]), samples=[talk])
    assert rewards.total == [3.0] and rewards.tokens == [(1.0, 2.0)]
    with pytest.raises(RewardError, match="returned 3 numbers for the 2 tokens of sample 0 of 1"):
        score(returning([[1, 2, 3]]), samples=[talk])
    got: dict[str, Any] = {}
    score(UserFunction("keep", lambda **given: got.update(given) or [0.0], None, frozenset()), samples=[talk])
    assert got["completion_mask"] == [[1, 0, 1]]


def test_no_samples_call_nobody() -> None:
    assert score(returning(None), samples=[]) == RewardScores({"mine": []}, [])


def test_a_missing_column_is_told_before_the_run() -> None:
    needy = PerCompletionReward("accuracy", lambda s: 0.0, frozenset({"solution"}))
    (problem,) = missing_reward_column_problems([needy, returning([])], frozenset({"answer"}))
    assert str(problem) == (
        "--reward_funcs accuracy: requires the column solution; the data has answer\n    try: --columns answer=solution"
    )
    assert missing_reward_column_problems([needy], frozenset({"solution"})) == []


def test_the_text_is_what_the_model_said_last() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "42"}]
    turns = [call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": parts}]
    assert said("x").text == judged("x").text == "x"
    assert RewardInput([], turns, (), True).text == "It is 42"
    assert (
        RewardInput([], [call], (), True).text
        == ""
        == RewardInput([], [{"role": "assistant", "content": None}], (), True).text
    )


def test_a_mistyped_parameter_is_no_column() -> None:
    typo = UserFunction("f", len, frozenset({"completion"}), frozenset({"completion"}))
    (problem,) = missing_reward_column_problems([typo], frozenset({"solution"}))
    assert problem.fix.startswith("did you mean completions?")


def test_a_function_that_leaves_the_program_is_an_error() -> None:
    def leaves(completions: list[str]) -> list[float]:
        raise SystemExit(5)

    with pytest.raises(RewardError, match="SystemExit: 5"):
        score(UserFunction("leaves", leaves, frozenset({"completions"}), frozenset()))


def test_a_function_that_changes_what_it_gets_changes_nothing_for_the_next() -> None:
    seen: list[Any] = []

    def spoil(prompts: Any, completions: Any, completion_ids: Any, tags: Any) -> list[float]:
        seen.append([prompts[0][0]["content"], completions[0][0]["content"], [*completion_ids[0]], [*tags[0]]])
        for values in (prompts, completions):
            values[0][0]["content"] = "spoiled"
        completion_ids[0].clear()
        tags[0].append("spoiled")
        del completions[1:]
        return [0.0, 0.0]

    async def spoil_later(prompts: Any, completions: Any, completion_ids: Any, tags: Any) -> list[float]:
        return spoil(prompts, completions, completion_ids, tags)

    takes = frozenset({"prompts", "completions", "completion_ids", "tags"})
    tags = ["a"]
    samples = [said("hello", tags=tags), said("hi", tags=tags)]
    functions = [UserFunction(name, spoil, takes, frozenset()) for name in ("one", "two")]
    later = [AsyncUserFunction(name, spoil_later, takes, frozenset()) for name in ("three", "four")]
    score(*functions, *later, samples=samples)
    assert seen == [["Q", "hello", [*map(ord, "hello")], ["a"]]] * 4 and tags == ["a"]


@pytest.mark.parametrize("value", [1e308, -1e308, 1e16, float("inf")])
def test_rewards_whose_sums_overflow_are_refused(value: float) -> None:
    with pytest.raises(RewardError, match="a finite number of at most 1e\\+15"):
        score(returning([value, 0.0, 0.0]))
    with pytest.raises(RewardError, match="a finite number of at most 1e\\+15"):
        score(returning([[value], [0.0, 0.0], [0.0] * 3]))


def test_sums_that_are_too_large_are_refused() -> None:
    with pytest.raises(RewardError, match=r"tokens rewards that add up to 1.8e\+15 for sample 1 of 3"):
        score(returning([[0.0], [9e14, 9e14], [0.0] * 3]))
    with pytest.raises(RewardError, match=r"--reward_weights: make the reward 1e\+30 for sample 2 of 3"):
        score(returning([0.0, 0.0, 1.0]), weights=(1e30,))
