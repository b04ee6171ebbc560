"""Biases and penalties on the logits of the next token, in the order of vLLM: logit bias, repetition penalty, frequency
and presence penalty; temperature and the choice of candidates come after.

Padding counts as no token, so that an answer is the same alone and in a batch of prompts of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitPenalties:
    """What changes the logits. Frequency and presence penalty are OpenAI's: for a token that the answer has c times,
    logit - c * frequency - (c > 0) * presence. The repetition penalty (arXiv 1909.05858) also counts the prompt."""

    repetition: float = 1.0
    """Logits of tokens of prompt and answer are divided by it where positive, and multiplied where negative."""
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""

    def __bool__(self) -> bool:
        return self != LogitPenalties()

    def apply(self, logits: Tensor, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return the changed logits.

        Args:
            logits: [b, vocabulary], float32.
            prompts: bool [b, vocabulary], the tokens of each prompt; read by the repetition penalty alone.
            answers: int64 [b, n], the tokens generated so far.
        """
        if self.bias:
            tokens = torch.tensor([token for token, _ in self.bias], device=logits.device)
            values = torch.tensor([value for _, value in self.bias], device=logits.device, dtype=logits.dtype)
            logits = logits.index_add(1, tokens, values.expand(len(logits), -1))
        counts = torch.zeros_like(logits).scatter_add_(1, answers, torch.ones_like(answers, dtype=logits.dtype))
        if self.repetition != 1.0:
            changed = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(prompts | (counts > 0), changed, logits)
        return logits - self.frequency * counts - self.presence * (counts > 0).to(logits.dtype)


class PenaltyProcessor:
    """Applies the penalties as a logits processor of transformers, whose rows begin with padded prompts."""

    def __init__(self, penalties: LogitPenalties, prompts: Sequence[Sequence[int]], beams: int) -> None:
        self._penalties = penalties
        self._width = max(map(len, prompts))
        self._prompts = [prompt for prompt in prompts for _ in range(beams)]
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[rows, vocabulary] of float32; `input_ids` [rows, width + generated]."""
        if self._seen is None:
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            for row, prompt in enumerate(self._prompts):
                self._seen[row, torch.tensor(prompt, device=scores.device)] = True
        return self._penalties.apply(scores, self._seen, input_ids[:, self._width :])
