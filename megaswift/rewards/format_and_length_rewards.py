"""Built-in rewards without dependencies: format, repetition, length.

Values are TRL's (`trl.rewards`) where it has the function; `format` is ms-swift's. Correctness is `accuracy`, programs
are `code_reward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaswift.errors import ConfigError, Problem
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters

_SWIFT = re.compile(r"<think>(?:(?!</think>\s*<answer>).)*</think>\s*<answer>.*</answer>\Z", re.DOTALL)
"""ms-swift's `<think>.*?</think>\\s*<answer>.*?</answer>`, linear in the text: if any `</think> <answer>` fits, the
first one does, so that no later one is tried."""
_THINK = re.compile(r"<think>(?!.*<think>)(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class PerCompletionReward:
    """A reward of one completion by itself."""

    name: str
    reward: Callable[[RewardInput], float]
    columns: frozenset[str] = frozenset()
    whole_groups: bool = False
    flag: str = ""
    """As typed."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[float]:
        """In their order."""
        return [self.reward(sample) for sample in samples]


def answer_format(options: BuiltInRewardParameters) -> PerCompletionReward:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, else 0."""
    return PerCompletionReward("format", lambda sample: float(_SWIFT.match(sample.text) is not None))


def think_format(options: BuiltInRewardParameters) -> PerCompletionReward:
    """1 for a text that begins with one `<think>...</think>`, else 0."""
    return PerCompletionReward("think_format", lambda sample: float(_THINK.match(sample.text) is not None))


def repetition(options: BuiltInRewardParameters) -> PerCompletionReward:
    """The share of n-grams of tokens that were there before, times the (negative) penalty: arXiv 2502.03373, appendix
    C.2."""
    n = options.repetition_n_grams
    most = options.repetition_max_penalty
    if most > 0:
        raise ConfigError(
            Problem(f"--repetition_max_penalty {most}", "would reward repetition", "use a number of 0 or less")
        )

    def reward(sample: RewardInput) -> float:
        ids = tuple(sample.token_ids)
        grams = [ids[i : i + n] for i in range(len(ids) - n + 1)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return repeated * most if repeated else 0.0

    return PerCompletionReward("repetition", reward)


def soft_overlong(options: BuiltInRewardParameters) -> PerCompletionReward:
    """0 up to soft_max_length - soft_cache_length tokens, then falling to -1: DAPO, arXiv 2503.14476, equation 13."""
    longest = options.soft_max_length or options.max_completion_length
    cache = options.soft_cache_length
    if cache is None:
        raise ConfigError(
            Problem(
                "--reward_funcs soft_overlong",
                "requires --soft_cache_length, the number of tokens over which the penalty grows",
                f"--soft_cache_length {max(longest // 5, 1)}",
            )
        )
    if cache > longest:
        raise ConfigError(
            Problem(
                f"--soft_cache_length {cache}",
                f"exceeds the maximum completion length of {longest} tokens",
                f"--soft_cache_length {max(longest // 5, 1)}",
            )
        )

    def reward(sample: RewardInput) -> float:
        length = len(sample.token_ids)
        over = length - (longest - cache)
        if length > longest:
            return -1.0
        return -over / cache if over > 0 else 0.0

    return PerCompletionReward("soft_overlong", reward)
