"""Right answers: the values of TRL's functions on the same samples, and a parser that cannot hang the run.

Covers: megaswift/rewards/math_answers.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from trl.rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward

from megaswift.errors import ConfigError, RewardError
from megaswift.rewards import accuracy
from megaswift.rewards.accuracy import CorrectnessCache
from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.sandbox import JobLimits, Sandbox
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.rewards.samples import judged, said

pytestmark = pytest.mark.wide

OPTIONS = BuiltInRewardParameters(max_completion_length=40)
PAIRS = [
    (r"\frac{1}{3}", r"My answer is \boxed{\frac{1}{3}}"),
    (r"\frac{1}{3}", r"\boxed{\frac{1}{2}}"),
    ("$\\frac{1}{2}$", r"\boxed{0.5}"),
    ("72", r"So it is \boxed{72}."),
    ("72", "The answer is 72"),
    ("72", "The answer is $72$."),
    ("72", "72"),
    ("72", "So $72$ it is"),
    ("1,234", r"\boxed{1234}"),
    (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}"),
    (r"$\{1, 2\}$", r"\boxed{2, 1}"),
    ("$x=3$", r"\boxed{3}"),
    ("$10\\%$", r"\boxed{0.1}"),
    ("$(1, 2)$", r"\boxed{(1,2)}"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("$a+b$", r"\boxed{b+a}"),
    ("the house", r"\boxed{3}"),
    ("", r"\boxed{1}"),
    ("3", ""),
    ("3", r"<think>\boxed{3}</think> It is \boxed{4}"),
    ("4", r"<think>\boxed{3}</think> It is \boxed{4}"),
    ("4", r"</think>a</think>\boxed{4}"),
    ("3", r"\boxed{3} I think. The final answer is $5$."),
    ("5", r"\boxed{3} I think. The final answer is $5$."),
    ("3", r"\boxed{__import__('os').abort()}"),
]
"""Solution and completion."""


def samples() -> list[RewardInput]:
    return [said(completion, solution=solution) for solution, completion in PAIRS]


def of_trl(function: Any, **more: Any) -> list[float]:
    """None is left out of TRL's sum."""
    completions = [[{"role": "assistant", "content": completion}] for _, completion in PAIRS]
    return [
        value or 0.0
        for value in function(completions=completions, solution=[solution for solution, _ in PAIRS], **more)
    ]


def test_accuracy_is_trls() -> None:
    ours = accuracy.accuracy_reward(OPTIONS)(samples())
    assert ours == of_trl(accuracy_reward) and 5 < sum(ours) < len(PAIRS) - 5
    assert ours == accuracy.accuracy_reward(OPTIONS)(
        [judged(completion, solution=solution) for solution, completion in PAIRS]
    )


def test_reasoning_accuracy_is_trls() -> None:
    assert accuracy.reasoning_accuracy_reward(OPTIONS)(samples()) == of_trl(reasoning_accuracy_reward)


def test_cosine_is_trls() -> None:
    options = replace(OPTIONS, cosine_max_len=30)
    ids = [list(sample.token_ids) for sample in samples()]
    trl = get_cosine_scaled_reward(
        30, min_value_wrong=-0.5, max_value_wrong=0.0, min_value_correct=0.5, max_value_correct=1.0
    )
    assert accuracy.cosine_reward(options)(samples()) == pytest.approx(of_trl(trl, completion_ids=ids), abs=1e-12)
    assert max(map(len, ids)) > 30 > min(map(len, ids))


def test_length_compares_the_completions_of_a_prompt() -> None:
    """Hand values: lengths 2, 4, 6 of one prompt, 3 of another."""
    right, wrong = r"\boxed{1}", r"\boxed{2}"
    group = [
        judged(right, 2, solution="1"),
        judged(wrong, 2, solution="1"),
        judged(right, 4, solution="1"),
        judged(wrong, 4, solution="1"),
        judged(right, 6, solution="1"),
        judged(wrong, 6, solution="1"),
    ]
    alone = replace(judged(right, 3, solution="1"), prompt="another")
    function = accuracy.length_reward(OPTIONS)
    assert function([*group, alone]) == [0.5, 0.0, 0.0, 0.0, -0.5, -0.5, 0.0] and function.whole_groups


def test_a_solution_that_is_no_text_is_told_with_its_sample() -> None:
    function = accuracy.accuracy_reward(OPTIONS)
    assert function([judged(r"\boxed{3}", solution=3)]) == [1.0]
    with pytest.raises(RewardError, match="the solution of sample 1 is None"):
        function([judged("a", solution="1"), judged("b", solution=None)])


def test_each_pair_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(Sandbox, "run", lambda self, more: jobs.extend(more) or [])
    judge = CorrectnessCache(_known={("1", "a"): 1.0, ("1", "b"): 0.0})
    assert judge.verdicts([("1", "b"), ("1", "a"), ("1", "b")]) == [0.0, 1.0, 0.0] and jobs == []


def test_what_the_parser_cannot_finish_gets_0() -> None:
    """9^(9^(9^9)) has more digits than there is memory; without a process of its own it stops the run."""
    judge = CorrectnessCache(Sandbox("maths", JobLimits(seconds=2.0, memory=2048)))
    start = time.monotonic()
    pairs = [("1", r"\boxed{9^{9^{9^{9}}}}"), ("$9^{9^{9^9}}$", r"\boxed{9^{9^{9^9}}+1}"), ("1", r"\boxed{1}")]
    assert judge.verdicts(pairs)[::2] == [0.0, 1.0]
    assert time.monotonic() - start < 300


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires the package math-verify"):
        load_reward_functions(["accuracy"], OPTIONS)
