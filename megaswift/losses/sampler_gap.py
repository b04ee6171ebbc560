"""The gap between the sampler and the trainer: two programs that give a token's log-probability not quite alike.

Owns how the gap is told, and the weights that correct for it: exp(old - sampled), truncated to bounds (TIS) or 0
outside of them (IcePop's masking), of a token or of a whole completion. Modes and defaults are those of TRL's
`vllm_importance_sampling_*`. Log-probabilities that the sampler could not tell are NaN: these tokens count for nothing
here and are weighed 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.losses.contract import Batch, Max, Mean, Metric, Min
from megaswift.losses.documents import document_index, document_sums
from megaswift.losses.pairs import token_mean
from megaswift.losses.policy_metrics import per_completion, reported_mean

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class Correction:
    """How weights against the gap are bounded."""

    mode: str = "sequence_mask"
    clip_max: float | None = 3.0
    clip_min: float | None = None

    def __post_init__(self) -> None:
        assert self.mode in MODES, f"unknown mode {self.mode}"

    @property
    def level(self) -> str:
        """`token` or `sequence`: what has a weight of its own (`Policy.ratio_level`)."""
        return self.mode.split("_")[0]

    def weights(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """[b, s], without a gradient: `fields["ratio"]`, from the trainer's log-probabilities [b, s] and
        `fields["sampled"]`.

        1 where there is no label.
        """
        mask = batch.loss_weights != 0
        gap = (logprobs.detach() - batch.fields["sampled"].to(logprobs.dtype)).nan_to_num(nan=0.0) * mask
        if self.level == "sequence":
            gap = document_sums(batch, gap)[document_index(batch)]
        return torch.where(mask, self.bound(gap), 1.0)

    def bound(self, gap: Tensor) -> Tensor:
        """exp of the gap, truncated, or 0 outside of the bounds."""
        found = gap.exp()
        low, high = (
            -math.inf if self.clip_min is None else self.clip_min,
            math.inf if self.clip_max is None else self.clip_max,
        )
        if self.mode.endswith("truncate"):
            return found.clamp(low, high)
        return found.masked_fill((found < low) | (found > high), 0.0)


def gap_metrics(logprobs: Tensor, batch: Batch) -> dict[str, Metric]:
    """Mean and largest |difference|, and the mean of exp |difference|: the factor by which a token's probability is
    off, 1 for none.

    The last one is NeMo-RL's.
    """
    away = (logprobs.detach() - batch.fields["sampled"].to(logprobs.dtype)).abs()
    known = (batch.loss_weights != 0) & ~away.isnan()
    away = torch.where(known, away, 0.0)
    return {
        "sampling/sampling_logp_difference/mean": token_mean(away, known),
        "sampling/sampling_logp_difference/max": Max(away.max() if away.numel() else 0.0),
        "sampling/token_mult_prob_error": token_mean(away.exp(), known),
    }


def ratio_metrics(batch: Batch, level: str) -> dict[str, Metric]:
    """Smallest, mean and largest of the weights that a loss was given."""
    ratio, mask = batch.fields["ratio"], batch.loss_weights != 0
    by_completion = level == "sequence"
    found = per_completion(batch, ratio, mask, empty=1.0) if by_completion else ratio[mask]
    mean: Mean = reported_mean(batch, ratio, by_completion, empty=1.0)
    return {
        "sampling/importance_sampling_ratio/min": Min(found.min() if found.numel() else float("inf")),
        "sampling/importance_sampling_ratio/mean": mean,
        "sampling/importance_sampling_ratio/max": Max(found.max() if found.numel() else 0.0),
    }
