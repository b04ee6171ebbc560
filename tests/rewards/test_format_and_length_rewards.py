"""Rewards by name: TRL's values on the same samples where it has the function, else values by hand with their
source."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace

import pytest
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from megaswift.errors import ConfigError
from megaswift.rewards import format_and_length_rewards
from megaswift.rewards.format_and_length_rewards import answer_format, think_format
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.rewards.samples import judged, said

OPTIONS = BuiltInRewardParameters(max_completion_length=100, soft_cache_length=20)
TEXTS = [
    "<think>\na\n</think>\nb",
    "<think>a</think>",
    "<think>a\nb",
    " <think>a</think>b",
    "<think><think>a</think>b",
    "<think>a</think>b<think>",
    "a</think>",
    "",
    "<think></think>",
    "<think>a</think><answer>b</answer>",
    "<think>a</think>\n\n<answer>b\nc</answer>",
    "<think>a</think><answer>b</answer>\n",
    "<think>a</think>x<answer>b</answer>",
    "<think>a</think><answer>b</answer><answer>c</answer>",
]


def test_think_format_is_trls() -> None:
    ours = format_and_length_rewards.think_format(OPTIONS)([said(text) for text in TEXTS])
    assert ours == think_format_reward([[{"content": text}] for text in TEXTS]) and 0 < sum(ours) < len(ours)


def test_format_asks_for_thought_and_answer_and_nothing_else() -> None:
    """By hand from ms-swift's rule: a thought, white space, an answer, the end of the text."""
    right = {9, 10, 13}
    assert format_and_length_rewards.answer_format(OPTIONS)([judged(text) for text in TEXTS]) == [
        float(i in right) for i in range(len(TEXTS))
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_repetition_is_trls(n: int) -> None:
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1], [], [1], list(range(50)) * 2, [7, 7, 8, 8, 7, 7]]
    ours = format_and_length_rewards.repetition(replace(OPTIONS, repetition_n_grams=n, repetition_max_penalty=-0.7))(
        [RewardInput("", "", i, True) for i in ids]
    )
    assert ours == get_repetition_penalty_reward(n, -0.7)(ids) and min(ours) < 0


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 100), (7, 3), (100, 0)])
def test_soft_overlong_is_trls(longest: int, cache: int) -> None:
    lengths = [0, 1, 4, 5, 6, 7, 8, 79, 80, 81, 90, 99, 100, 101, 1000]
    ours = format_and_length_rewards.soft_overlong(replace(OPTIONS, soft_max_length=longest, soft_cache_length=cache))(
        [judged("", n) for n in lengths]
    )
    assert ours == get_soft_overlong_punishment(longest, cache)([[1] * n for n in lengths]) and ours[-1] == -1


def test_soft_overlong_ends_at_the_longest_completion_by_default() -> None:
    assert format_and_length_rewards.soft_overlong(OPTIONS)([judged("", n) for n in (80, 90, 100)]) == [0.0, -0.5, -1.0]


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="would reward repetition"):
        format_and_length_rewards.repetition(replace(OPTIONS, repetition_max_penalty=1.0))
    with pytest.raises(ConfigError, match="exceeds the maximum completion length of 100 tokens"):
        format_and_length_rewards.soft_overlong(replace(OPTIONS, soft_cache_length=101))


def test_built_in_formats_read_a_text_once() -> None:
    """A model that repeats a tag costs time in proportion to its text: 1.6 million characters in well under a second,
    of which 128,000 took six."""
    reward = answer_format(BuiltInRewardParameters(100))
    thought = think_format(BuiltInRewardParameters(100))
    for piece in ("</think><answer>", "</think> ", "</answer>", "<think>", "</think>" + " " * 50 + "x"):
        sample = judged("<think>" + piece * (1_600_000 // len(piece)), 1)
        began = time.process_time()
        assert reward([sample]) == [0.0]
        thought([sample])
        assert time.process_time() - began < 2


def test_format_is_ms_swifts_expression() -> None:
    swift = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL)
    pieces, rng = ("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"), random.Random(3)
    texts = ["<think>" + "".join(rng.choices(pieces, k=rng.randint(3, 8))) + "</answer>" for _ in range(20_000)]
    found = answer_format(BuiltInRewardParameters(100))([judged(text, 1) for text in texts])
    assert found == [float(swift.match(text) is not None) for text in texts] and 0 < sum(found) < len(found)
