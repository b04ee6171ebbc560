"""Scores completions with the reward functions; every rank gets all rewards.

Owns the text of a completion. Each rank judges what it sampled; a mistake of a reward function on one rank stops the
run on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift import distributed
from megaswift.data.prompts.source import Prompt
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import RewardFunction, score_rewards
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, asked_prompt, model_token_mask

ENVIRONMENT = "environment"


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion of a prompt, with its rewards."""

    prompt: Prompt
    completion: Completion
    text: str
    rewards: dict[str, float]
    total: float
    """The weighted sum; NaN where no reward function applies."""
    tokens: tuple[float, ...] | None = None
    """Weighted rewards of the tokens that the model wrote; None if the reward functions rate whole completions."""
    baseline: float = math.nan
    """The total of the greedy completion of the same prompt; NaN unless the estimator needs it."""

    @property
    def by_token(self) -> list[float] | None:
        """The total reward of each token that the model wrote: a turn's reward is at the turn's last token, a reward of
        the whole conversation at the last token of all. None where all rewards are of the whole conversation.
        """
        conversation = self.completion
        if not isinstance(conversation, MultiTurnCompletion):
            return None if self.tokens is None else [*self.tokens]
        rewards = [0.0] * sum(conversation.own) if self.tokens is None else [*self.tokens]
        if self.tokens is None and rewards:
            rewards[-1] = self.total - conversation.reward
        if rewards:  # a server may end a turn without a token: its reward stands at the token before, or at the first
            for end, reward in zip(conversation.ends, conversation.rewards, strict=True):
                rewards[max(end - 1, 0)] += reward
        return rewards


@dataclass(frozen=True)
class RewardScorer:
    """The reward functions of a run."""

    functions: Sequence[RewardFunction]
    weights: Sequence[float]
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, without special tokens."""

    def reward_input(self, prompt: Prompt, completion: Completion, text: str) -> RewardInput:
        """Return a completion as reward functions read it: text, or a message where the prompt was messages."""
        content: Any = text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]
        if isinstance(completion, MultiTurnCompletion):
            content = list(completion.messages)
        return RewardInput(
            prompt.content if isinstance(prompt.content, str) else list(prompt.content),
            content,
            completion.token_ids,
            completion.finished,
            prompt.columns,
            model_token_mask(completion),
        )

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], mine: range
    ) -> list[ScoredCompletion]:
        """Return all rollouts on every rank; this rank judges `mine`. An environment's own rewards are added.
        Collective."""
        prompts = [asked_prompt(p, c) for p, c in zip(prompts, completions, strict=True)]
        texts = [self.decode(c.token_ids) for c in completions]

        def work() -> list[tuple[dict[str, float], float, tuple[float, ...] | None]]:
            if not self.functions:
                return [({}, 0.0, None)] * len(mine)
            if not mine:
                return []
            scored = score_rewards(
                self.functions, self.weights, [self.reward_input(prompts[i], completions[i], texts[i]) for i in mine]
            )
            tokens = scored.tokens or [None] * len(mine)
            return [
                ({n: values[k] for n, values in scored.per_function.items()}, scored.total[k], tokens[k])
                for k in range(len(mine))
            ]

        rewards = [reward for share in distributed.run_and_gather_on_all_ranks(work) for reward in share]
        rollouts = [
            ScoredCompletion(*sample, *reward)
            for sample, reward in zip(zip(prompts, completions, texts, strict=True), rewards, strict=True)
        ]
        return [
            with_environment_reward(r, r.completion) if isinstance(r.completion, MultiTurnCompletion) else r
            for r in rollouts
        ]


def with_environment_reward(rollout: ScoredCompletion, conversation: MultiTurnCompletion) -> ScoredCompletion:
    """Add the reward of its environment to a rollout."""
    given = 0.0 if math.isnan(rollout.total) else rollout.total
    return replace(
        rollout, rewards={**rollout.rewards, ENVIRONMENT: conversation.reward}, total=given + conversation.reward
    )
