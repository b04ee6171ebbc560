"""Which completions are kept, the rows that they become, and pass@k. No torch.

pass@k is the unbiased estimator of Chen et al. (2021), eq. 1: the probability that one of k completions, drawn from the
n of a prompt without replacement, passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from megaswift.rejection.journal import PromptScores, SampledCompletion
from megaswift.rejection.options.sampling import SelectionOptions


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt with its completions and their rewards."""

    content: str | tuple[Mapping[str, Any], ...]
    """The text, or the messages."""
    columns: Mapping[str, Any]
    """The row's other columns."""
    tools: Sequence[Mapping[str, Any]] | None
    completions: Sequence[SampledCompletion]
    scores: PromptScores | None = None
    """None without rewards."""

    def reward(self, number: int) -> float | None:
        """Return the reward of a completion; None where no function applies."""
        return None if self.scores is None else self.scores.total[number]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that one of k of n completions passes, of which `passed` do."""
    return 1 - comb(n - passed, k) / comb(n, k)


def passes(prompt: SampledPrompt, threshold: float) -> int:
    """Count the completions that pass."""
    rewards = [prompt.reward(i) for i in range(len(prompt.completions))]
    return sum(reward is not None and reward >= threshold for reward in rewards)


def is_too_easy(prompt: SampledPrompt, options: SelectionOptions) -> bool:
    """Return whether too many completions of a prompt pass."""
    most = options.easy_query_threshold
    return most is not None and passes(prompt, options.pass_threshold) > most * len(prompt.completions)


def candidates(prompt: SampledPrompt, options: SelectionOptions) -> list[int]:
    """Return the numbers of the completions that may be kept, best first; each text once."""
    first: dict[str, int] = {}
    for number, completion in enumerate(prompt.completions):
        usable = completion.text.strip() and (completion.finished or options.keep_truncated)
        if usable and (prompt.scores is None or prompt.reward(number) is not None):
            first.setdefault(completion.text, number)
    if prompt.scores is None:
        return [*first.values()]
    return sorted(first.values(), key=lambda number: (-(prompt.reward(number) or 0.0), number))


def kept(prompt: SampledPrompt, options: SelectionOptions) -> list[int]:
    """Return the numbers of the completions that become rows."""
    if is_too_easy(prompt, options):
        return []
    least = options.reward_threshold
    good = [n for n in candidates(prompt, options) if least is None or (prompt.reward(n) or 0.0) >= least]
    return good[: options.num_best or (1 if prompt.scores is not None else None)]


def pair(prompt: SampledPrompt, options: SelectionOptions) -> tuple[int, int] | None:
    """Return the best and the worst completion; None where their rewards are too close, or the best is too bad."""
    ranked = candidates(prompt, options)
    if is_too_easy(prompt, options) or len(ranked) < 2:
        return None
    best, worst = ranked[0], ranked[-1]
    high, low = prompt.reward(best) or 0.0, prompt.reward(worst) or 0.0
    if high - low <= options.min_margin or (options.reward_threshold is not None and high < options.reward_threshold):
        return None
    return best, worst


def rows_of(prompt: SampledPrompt, options: SelectionOptions, free: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a prompt, which sft or dpo reads.

    Args:
        prompt: The prompt.
        options: What is kept.
        free: The prompt's columns that no row format reads.
    """
    if options.output_format == "preference":
        found = pair(prompt, options)
        return [] if found is None else [_pair_row(prompt, *found, free)]
    return [_row(prompt, number, free) for number in kept(prompt, options)]


def _row(prompt: SampledPrompt, number: int, free: Mapping[str, Any]) -> dict[str, Any]:
    text = prompt.completions[number].text
    row: dict[str, Any] = (
        {"prompt": prompt.content, "completion": text}
        if isinstance(prompt.content, str)
        else {"messages": [*prompt.content, {"role": "assistant", "content": text}], **_tools(prompt)}
    )
    rewarded = {} if prompt.scores is None else {"reward": prompt.reward(number)}
    return {**row, **free, **rewarded}


def _pair_row(prompt: SampledPrompt, best: int, worst: int, free: Mapping[str, Any]) -> dict[str, Any]:
    chosen, rejected = (prompt.completions[number].text for number in (best, worst))
    row: dict[str, Any] = (
        {"prompt": prompt.content, "chosen": chosen, "rejected": rejected}
        if isinstance(prompt.content, str)
        else {
            "messages": [*prompt.content, {"role": "assistant", "content": chosen}],
            "rejected_response": rejected,
            **_tools(prompt),
        }
    )
    return {**row, **free, "chosen_reward": prompt.reward(best), "rejected_reward": prompt.reward(worst)}


def _tools(prompt: SampledPrompt) -> dict[str, Any]:
    return {"tools": list(prompt.tools)} if prompt.tools else {}
