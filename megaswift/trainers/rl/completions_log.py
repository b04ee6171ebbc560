"""completions.jsonl: completions with their rewards and advantages, written by rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaswift import distributed
from megaswift.inference.detokenizer import BROKEN
from megaswift.inference.token_texts import TokenTexts
from megaswift.rollout.sampler import Completion
from megaswift.trainers.hook import Run, StepRecord
from megaswift.trainers.hooks.metrics import JsonLinesHook
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, model_token_mask
from megaswift.trainers.rl.scorer import ScoredCompletion
from megaswift.trainers.rl.source import RolloutSource


class CompletionsLog(JsonLinesHook):
    """Writes a line for each completion, with the first step that trains on it."""

    def __init__(self, path: Path, source: RolloutSource, most: int | None, with_tokens: int, tokenizer: Any) -> None:
        super().__init__(path)
        self.source = source
        self.most = most
        """Maximum lines of a generation; None: all."""
        self.with_tokens = with_tokens
        """The first lines of a generation, which have the tokens of the completion too."""
        self.texts = TokenTexts(tokenizer)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Write the generation if this step is the first to use it."""
        if self.source.fresh and distributed.global_rank() == 0:
            self.write(*self.lines(step.number))

    def lines(self, step: int) -> Iterator[dict[str, Any]]:
        """Make the lines of the present generation."""
        for number, (rollout, advantages) in enumerate(self.source.fresh[: self.most]):
            line = completion_line(step, rollout, advantages)
            if number < self.with_tokens:
                line |= token_fields(rollout.completion, advantages, self.texts)
            yield line


def completion_line(step: int, rollout: ScoredCompletion, advantages: np.ndarray) -> dict[str, Any]:
    """Return the line of a completion."""
    rewards: dict[str, Any] = {f"rewards/{name}": value for name, value in rollout.rewards.items()}
    if rollout.tokens is not None:
        rewards["token_rewards"] = rollout.by_token
    if isinstance(rollout.completion, MultiTurnCompletion):
        rewards["turn_rewards"] = rollout.completion.rewards
    return {
        "step": step,
        "prompt": rollout.prompt.content,
        "completion": completion_text(rollout),
        "reward": rollout.total,
        **rewards,
        "advantage": float(advantages.mean()) if len(advantages) else 0.0,
        "tokens": len(rollout.completion.token_ids),
        "finished": rollout.completion.finished,
    }


def completion_text(rollout: ScoredCompletion) -> Any:
    """Return the text of a completion; for a conversation its messages."""
    return list(rollout.completion.messages) if isinstance(rollout.completion, MultiTurnCompletion) else rollout.text


def token_fields(completion: Completion, advantages: np.ndarray, texts: TokenTexts) -> dict[str, Any]:
    """Return the text and the log-probability of each token, and the advantage of each where they differ; null for
    tokens that the model did not write. Three decimals: some 20 bytes a token in all, 30 with advantages.

    The texts joined are the completion with its special tokens. A character that is split over tokens stands at the
    first of them.
    """
    own = model_token_mask(completion)
    fields: dict[str, Any] = {
        "token_texts": token_texts(completion.token_ids, texts),
        "token_logprobs": _at_own_tokens(completion.logprobs, own),
    }
    if len(advantages) and advantages.min() != advantages.max():
        fields["token_advantages"] = _at_own_tokens(advantages.tolist(), own)
    return fields


def token_texts(tokens: Sequence[int], texts: TokenTexts) -> list[str]:
    """Return what each token adds to the text of an answer; a special token by its name."""
    written: list[str] = []
    unfinished: list[int] = []
    held = b""
    for place, token in enumerate(tokens):
        held += texts.utf8(token, not place)
        unfinished.append(token)
        text = held.decode("utf-8", errors="replace")
        if BROKEN in text and len(unfinished) < 4:  # a character is not complete before its last byte
            continue
        written += [text or texts.text(token), *[""] * (len(unfinished) - 1)]
        unfinished = []
        held = b""
    return written + [held.decode("utf-8", errors="replace"), *[""] * (len(unfinished) - 1)] if unfinished else written


def _at_own_tokens(numbers: Iterable[float], own: Sequence[bool]) -> list[float | None]:
    """Spread the numbers of the model's own tokens over all tokens."""
    remaining = iter(numbers)
    spread = [next(remaining) if mine else math.nan for mine in own]
    return [round(value, 3) if math.isfinite(value) else None for value in spread]
