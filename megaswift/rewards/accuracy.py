"""Rewards for correct answers: accuracy, and variants that depend on length. Values are TRL's where it has the
function.

Owns asking the sandbox about pairs of solution and completion, once each. A row whose solution cannot be parsed gets 0
from each function here; TRL leaves such a row out of the sum, which is the same.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from megaswift import log
from megaswift.errors import ConfigError, Problem, RewardError
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.sandbox import JobLimits, Sandbox
from megaswift.rewards.scoring import BuiltInRewardParameters, reward_function_flag

SOLUTION = "solution"
THOUGHT = "</think>"
Verdict = float | None
CHUNK = 256


@dataclass
class CorrectnessCache:
    """Verdicts on pairs; those of the last call are kept, for the next function that asks about the same samples."""

    sandbox: Sandbox = field(default_factory=lambda: Sandbox("maths", JobLimits(seconds=10.0, memory=2048)))
    warned: bool = False
    _known: dict[tuple[str, str], Verdict] = field(default_factory=dict)

    def check(self, flag: str) -> None:
        """ConfigError unless a right answer is found right."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(Problem(flag, "requires the package math-verify", "run pip install math-verify"))
        try:
            right = self.verdicts([("1", "\\boxed{1}")]) == [1.0]
        except RewardError:
            self.sandbox.close()
            self.sandbox.locked = False  # a parser under limits, as it is without us
            right = self.verdicts([("1", "\\boxed{1}")]) == [1.0]
        if not right:
            raise ConfigError(
                Problem(
                    flag,
                    "the installed math-verify does not work (1 and 1 are not equal)",
                    "run pip install -U math-verify",
                )
            )

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """1, 0 or None of each (solution, completion); 0 where the parser takes too long."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        verdicts = {pair: self._known[pair] for pair in pairs if pair in self._known}
        for start in range(0, len(new), CHUNK):
            part = new[start : start + CHUNK]
            outcomes = self.sandbox.run(
                [{"solution": solution, "completion": completion} for solution, completion in part]
            )
            for pair, outcome in zip(part, outcomes, strict=True):
                verdicts[pair] = {"null": None, "1.0": 1.0}.get(outcome.result if outcome.how == "ended" else "", 0.0)
        self._known = verdicts
        return [verdicts[pair] for pair in pairs]


@functools.cache
def correctness_cache() -> CorrectnessCache:
    """One for all functions of a run."""
    return CorrectnessCache()


Shape = Callable[[Sequence[RewardInput], Sequence[Verdict]], list[float]]


@dataclass(frozen=True)
class AccuracyReward:
    """A reward that follows from whether each completion is right."""

    name: str
    shape: Shape
    after_thought: bool = False
    """Only what follows the reasoning counts."""
    whole_groups: bool = False
    columns: frozenset[str] = frozenset({SOLUTION})
    flag: str = ""
    """As typed."""

    def _pair(self, number: int, sample: RewardInput) -> tuple[str, str]:
        solution = sample.columns.get(SOLUTION)
        if not isinstance(solution, str | int | float) or isinstance(solution, bool):
            what = f"the solution of sample {number} is {solution!r}, not a string"
            raise RewardError(
                Problem(
                    reward_function_flag(self),
                    what,
                    "use a column `solution` of strings; rename with --columns YOURS=solution",
                )
            )
        return str(solution), sample.text.rpartition(THOUGHT)[2] if self.after_thought else sample.text

    def __call__(self, samples: Sequence[RewardInput]) -> list[float]:
        """One value a sample."""
        pairs = [self._pair(i, sample) for i, sample in enumerate(samples)]
        cache = correctness_cache()
        verdicts = cache.verdicts(pairs)
        if None in verdicts and not cache.warned:
            cache.warned = True
            example = pairs[verdicts.index(None)][0]
            log.warn(f"{self.name}: solutions that cannot be parsed get reward 0, for example {example[:80]!r}")
        return self.shape(samples, verdicts)


def _built(function: AccuracyReward) -> AccuracyReward:
    correctness_cache().check(f"--reward_funcs {function.name}")
    return function


def accuracy_reward(options: BuiltInRewardParameters) -> AccuracyReward:
    """1 for a right answer, else 0."""
    return _built(AccuracyReward("accuracy", lambda samples, verdicts: [v or 0.0 for v in verdicts]))


def reasoning_accuracy_reward(options: BuiltInRewardParameters) -> AccuracyReward:
    """1 for a right answer after the reasoning; 0 too for reasoning without an end."""

    def shape(samples: Sequence[RewardInput], verdicts: Sequence[Verdict]) -> list[float]:
        return [(v or 0.0) if THOUGHT in s.text else 0.0 for s, v in zip(samples, verdicts, strict=True)]

    return _built(AccuracyReward("reasoning_accuracy", shape, after_thought=True))


def cosine_reward(options: BuiltInRewardParameters) -> AccuracyReward:
    """Right and short is best, wrong and short is worst, half a cosine between: arXiv 2502.03373, appendix C.1."""
    longest = options.cosine_max_len or options.max_completion_length
    right = options.cosine_min_len_value_correct, options.cosine_max_len_value_correct
    wrong = options.cosine_min_len_value_wrong, options.cosine_max_len_value_wrong

    def value(sample: RewardInput, verdict: Verdict) -> float:
        if verdict is None:
            return 0.0
        short, long = right if verdict else wrong
        return long + 0.5 * (short - long) * (1.0 + math.cos(min(len(sample.token_ids) / longest, 1.0) * math.pi))

    return _built(
        AccuracyReward(
            "cosine", lambda samples, verdicts: [value(*pair) for pair in zip(samples, verdicts, strict=True)]
        )
    )


def length_reward(options: BuiltInRewardParameters) -> AccuracyReward:
    """From 0.5 for the shortest completion of a prompt to -0.5 for the longest; a wrong one gets at most 0: arXiv
    2501.12599, 2.3.3."""

    def shape(samples: Sequence[RewardInput], verdicts: Sequence[Verdict]) -> list[float]:
        shaped: list[float] = []
        for _, group in groupby(zip(samples, verdicts, strict=True), key=lambda pair: pair[0].prompt):
            members = list(group)
            sizes = [len(sample.token_ids) for sample, _ in members]
            spread = max(sizes) - min(sizes)
            values = [0.5 - (size - min(sizes)) / spread if spread else 0.0 for size in sizes]
            shaped += [
                value if verdict else min(value, 0.0) for value, (_, verdict) in zip(values, members, strict=True)
            ]
        return shaped

    return _built(AccuracyReward("length", shape, whole_groups=True))
