"""Importance weights that correct for the difference between the sampler's and the trainer's log-probabilities.

Owns the metrics of the gap, and the weights that correct for it: exp(old - sampled), truncated to bounds (TIS) or 0
outside of them (IcePop's masking). `token_*` and `sequence_*` are TRL's `vllm_importance_sampling_mode`: the ratio of a
token, or the product over a completion. The product dies out on long completions (a noise of 0.03 a token leaves a
median weight of 0.02 at 8,000 tokens), so the default is `token_truncate`; `geometric_*` takes the geometric mean of a
completion's ratios. Log-probabilities that the sampler does not know are NaN: such a token has weight 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.losses.advantages import LARGEST_LOG_RATIO
from megaswift.losses.contract import Batch, MaxMetric, MeanMetric, Metric, MinMetric, metrics_reported
from megaswift.losses.policy_metrics import token_mean_per_completion, token_or_completion_mean_metric
from megaswift.losses.preference_pairs import token_mean_metric
from megaswift.trainers.rl.options.rl import MODES


@dataclass(frozen=True)
class SamplerCorrection:
    """The weights of samples, and their bounds."""

    mode: str = "token_truncate"
    clip_max: float | None = 3.0
    clip_min: float | None = None
    filter_max: float | None = None
    """Completions whose ratios have a geometric mean above this have weight 0, whatever the mode. None: no bound. With
    `token_truncate` this is seq-mask-tis, verl's geometric `rollout_rs` beside a token's `rollout_is`."""
    filter_min: float | None = None
    """The same below."""

    def __post_init__(self) -> None:
        assert self.mode in MODES, f"unknown mode {self.mode}"

    @property
    def level(self) -> str:
        """`token` or `sequence`: what has a weight of its own (`Policy.ratio_level`)."""
        return "token" if self.mode.startswith("token") else "sequence"

    def weights(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Compute the weights of completions [n, t], without a gradient, from old - sampled log-probabilities [n, t]; 1
        outside of `mask` (bool [n, t])."""
        gap = torch.where(mask, gap.detach().nan_to_num(nan=0.0), 0.0)
        # Added up in float64: of long completions float32 sums depend on the order.
        total = gap.double().sum(1, keepdim=True)
        mean = total / mask.sum(1, keepdim=True).clamp(min=1)
        wanted = {"token": gap, "sequence": total, "geometric": mean}[self.mode.partition("_")[0]]
        weights = self._bounded(_ratio(wanted).to(gap.dtype)).expand_as(gap)
        within = _within(_ratio(mean), self.filter_min, self.filter_max)
        return torch.where(mask, torch.where(within, weights, 0.0), 1.0)

    def _bounded(self, ratio: Tensor) -> Tensor:
        """Truncated to the bounds, or 0 outside of them."""
        if self.mode.endswith("truncate"):
            return ratio.clamp(*_ends(self.clip_min, self.clip_max))
        return ratio.masked_fill(~_within(ratio, self.clip_min, self.clip_max), 0.0)


def _ratio(gap: Tensor) -> Tensor:
    return gap.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _ends(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else low, math.inf if high is None else high


def _within(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    least, most = _ends(low, high)
    return (ratio >= least) & (ratio <= most)


DEPTHS = {"1k": (2**10, 2**12), "4k": (2**12, 2**14), "16k": (2**14, 2**16), "64k": (2**16, math.inf)}
"""Tokens of context before a token, from and up to, by the name of a metric: a fault of positions grows with them."""
ERROR = "sampling/token_mult_prob_error"
KL = ("sampling/kl_sample_train_v1", "sampling/kl_sample_train_v2")
LOGPROB_GAP = metrics_reported(
    ("sampling/sampling_logp_difference/mean", ERROR, *(f"{ERROR}/{name}" for name in DEPTHS), *KL),
    largest=("sampling/sampling_logp_difference/max",),
)
"""The names that `logprob_gap_metrics` reports."""
CORRECTION_WEIGHTS = metrics_reported(
    ("sampling/importance_sampling_ratio/mean",),
    largest=("sampling/importance_sampling_ratio/max",),
    smallest=("sampling/importance_sampling_ratio/min",),
)
"""The names that `correction_weight_metrics` reports."""


def logprob_gap_metrics(logprobs: Tensor, batch: Batch) -> dict[str, Metric]:
    """Measure the mean and largest |difference|; the mean of exp |difference|, the factor by which a token's
    probability is off, 1 for none, also by the tokens of context; and two estimates of KL(sampler || trainer).

    The factor is NeMo-RL's. The estimates are tinker-cookbook's: the mean difference, and half the mean square.
    """
    apart = batch.fields["sampled"].to(logprobs.dtype) - logprobs.detach()
    known = (batch.loss_weights != 0) & ~apart.isnan()
    apart = torch.where(known, apart, 0.0)
    away = apart.abs()
    factor = _ratio(away)
    context = batch.positions + 1
    deep = {name: known & (context >= least) & (context < most) for name, (least, most) in DEPTHS.items()}
    return {
        "sampling/sampling_logp_difference/mean": token_mean_metric(away, known),
        "sampling/sampling_logp_difference/max": MaxMetric(away.max() if away.numel() else 0.0),
        ERROR: token_mean_metric(factor, known),
        **{f"{ERROR}/{name}": token_mean_metric(factor, tokens) for name, tokens in deep.items()},
        KL[0]: token_mean_metric(apart, known),
        KL[1]: token_mean_metric(apart.square() / 2, known),
    }


def correction_weight_metrics(batch: Batch, level: str) -> dict[str, Metric]:
    """Measure the smallest, mean and largest weight that a loss was given."""
    ratio = batch.fields["ratio"]
    mask = batch.loss_weights != 0
    by_completion = level == "sequence"
    ratios = token_mean_per_completion(batch, ratio, mask, empty=1.0) if by_completion else ratio
    counted = torch.ones_like(ratios, dtype=torch.bool) if by_completion else mask
    mean: MeanMetric = token_or_completion_mean_metric(batch, ratio, by_completion, empty=1.0)
    least = ratios.masked_fill(~counted, math.inf)
    most = ratios.masked_fill(~counted, 0.0)
    return {
        "sampling/importance_sampling_ratio/min": MinMetric(least.min() if ratios.numel() else math.inf),
        "sampling/importance_sampling_ratio/mean": mean,
        "sampling/importance_sampling_ratio/max": MaxMetric(most.max() if ratios.numel() else 0.0),
    }
