"""Completions as rewards see them, and what the rewards say, on every rank.

Owns the text of a completion. Each rank judges what it sampled; a mistake of a reward function on one rank stops the
run on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift import distributed
from megaswift.data.prompts import Prompt
from megaswift.rewards.contract import RewardFunction, RewardInput, score_rewards
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.multi_turn import Conversation, action_mask

ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Rollout:
    """A prompt, a completion, what it is worth."""

    prompt: Prompt
    completion: Completion
    text: str
    rewards: dict[str, float]
    total: float
    """The weighted sum; NaN where no reward function applies."""
    tokens: tuple[float, ...] | None = None
    """What reward functions gave by token that the model wrote, weighted; None where they gave numbers for the
    whole."""
    baseline: float = math.nan
    """The total of the greedy completion of the same prompt; NaN unless the estimator needs it."""

    @property
    def by_token(self) -> list[float] | None:
        """The total by token that the model wrote: rewards of an environment's turns stand at the turns' last tokens,
        those of the whole at the last of all. None where everything is of the whole.
        """
        talk = self.completion
        if not isinstance(talk, Conversation):
            return None if self.tokens is None else [*self.tokens]
        found = [0.0] * sum(talk.own) if self.tokens is None else [*self.tokens]
        if self.tokens is None and found:
            found[-1] = self.total - talk.reward
        if found:  # a server may end a turn without a token: its reward stands at the token before, or at the first
            for end, reward in zip(talk.ends, talk.rewards, strict=True):
                found[max(end - 1, 0)] += reward
        return found


@dataclass(frozen=True)
class RewardScorer:
    """The reward functions of a run."""

    functions: Sequence[RewardFunction]
    weights: Sequence[float]
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, without special tokens."""

    def judged(self, prompt: Prompt, completion: Completion, text: str) -> RewardInput:
        """Text, or a message where the prompt was messages."""
        said: Any = text if isinstance(prompt.said, str) else [{"role": "assistant", "content": text}]
        if isinstance(completion, Conversation):
            said = list(completion.messages)
        return RewardInput(
            prompt.said if isinstance(prompt.said, str) else list(prompt.said),
            said,
            completion.token_ids,
            completion.finished,
            prompt.columns,
            action_mask(completion),
        )

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], mine: range) -> list[Rollout]:
        """All rollouts, on every rank; this one judges `mine`. An environment's own rewards count beside.
        Collective."""
        texts = [self.decode(c.token_ids) for c in completions]

        def work() -> list[tuple[dict[str, float], float, tuple[float, ...] | None]]:
            if not self.functions:
                return [({}, 0.0, None)] * len(mine)
            if not mine:
                return []
            found = score_rewards(
                self.functions, self.weights, [self.judged(prompts[i], completions[i], texts[i]) for i in mine]
            )
            tokens = found.tokens or [None] * len(mine)
            return [
                ({n: values[k] for n, values in found.per_function.items()}, found.total[k], tokens[k])
                for k in range(len(mine))
            ]

        rewards = [reward for share in distributed.run_on_all_ranks(work) for reward in share]
        found = [
            Rollout(*one, *reward)
            for one, reward in zip(zip(prompts, completions, texts, strict=True), rewards, strict=True)
        ]
        return [with_environment(r, r.completion) if isinstance(r.completion, Conversation) else r for r in found]


def with_environment(rollout: Rollout, talk: Conversation) -> Rollout:
    """The rollout with what its environment gave."""
    given = 0.0 if math.isnan(rollout.total) else rollout.total
    return replace(rollout, rewards={**rollout.rewards, ENVIRONMENT: talk.reward}, total=given + talk.reward)
