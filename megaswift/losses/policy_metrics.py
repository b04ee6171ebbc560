"""Metrics of policy losses under TRL's names: clip ratios, entropy, KL.

Owns means over the completions of `batch.fields["completions"]`, and metrics made of them. A weight that belongs to a
whole completion counts once for each completion, one of a token once for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaswift.losses.contract import Batch, MaxMetric, MeanMetric, Metric, MinMetric, metrics_reported
from megaswift.losses.document_segments import document_sums, masked_tokens_per_document
from megaswift.losses.policy_loss_types import PolicyLossInputs, vespo_weights
from megaswift.losses.preference_pairs import pair_mean_metric, token_mean_metric


def masked_tokens_per_completion(batch: Batch, mask: Tensor) -> Tensor:
    """Count each completion's tokens in the mask: int64 [n]."""
    return masked_tokens_per_document(batch, mask)[batch.fields["completions"]]


def token_mean_per_completion(batch: Batch, x: Tensor, mask: Tensor, empty: float = 0.0) -> Tensor:
    """Average x [b, s] over the masked tokens of each completion, to [n]; a completion without any gets `empty`.
    Differentiable."""
    lengths = masked_tokens_per_completion(batch, mask)
    means = document_sums(batch, x * mask)[batch.fields["completions"]] / lengths.clamp(min=1)
    return means + empty * (lengths == 0)


def token_or_completion_mean_metric(batch: Batch, x: Tensor, by_completion: bool, empty: float = 0.0) -> MeanMetric:
    """Return the metric for a mean over labeled tokens, or over completions."""
    mask = batch.loss_weights != 0
    return (
        pair_mean_metric(token_mean_per_completion(batch, x, mask, empty))
        if by_completion
        else token_mean_metric(x, mask)
    )


CLIPPED = metrics_reported(
    ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    largest=("clip_ratio/high_max",),
    smallest=("clip_ratio/low_min",),
)
"""The names that `clip_metrics` reports."""
CISPO_CLIPPED = metrics_reported(("cispo_clip_ratio",))
VESPO_WEIGHTS = metrics_reported(("vespo/phi_seq_mean",))


def clip_metrics(x: PolicyLossInputs, batch: Batch, by_completion: bool) -> dict[str, Metric]:
    """Measure the share of weights that a bound holds back, below, above and both; the smallest and largest share of a
    completion."""
    s = x.settings
    mask = batch.loss_weights != 0
    low = ((x.bounded < 1 - s.epsilon) & (x.advantages < 0)).to(x.weights.dtype)
    high = ((x.bounded > 1 + s.high) & (x.advantages > 0)).to(x.weights.dtype)
    seen = masked_tokens_per_completion(batch, mask) >= (0 if by_completion else 1)
    lowest = torch.where(seen, token_mean_per_completion(batch, low, mask), 1.0)
    highest = torch.where(seen, token_mean_per_completion(batch, high, mask), 0.0)
    return {
        "clip_ratio/low_mean": token_or_completion_mean_metric(batch, low, by_completion),
        "clip_ratio/high_mean": token_or_completion_mean_metric(batch, high, by_completion),
        "clip_ratio/region_mean": token_or_completion_mean_metric(batch, low + high, by_completion),
        # Shares lie between 0 and 1, so these change nothing where a micro-batch has no completion.
        "clip_ratio/low_min": MinMetric(lowest.min() if lowest.numel() else 1.0),
        "clip_ratio/high_max": MaxMetric(highest.max() if highest.numel() else 0.0),
    }


def cispo_clip_metrics(x: PolicyLossInputs, batch: Batch, by_completion: bool) -> dict[str, Metric]:
    """Measure the share of weights that CISPO truncates where the advantage is positive."""
    clipped = (x.weights > x.settings.cap) & (x.advantages > 0)
    return {"cispo_clip_ratio": token_or_completion_mean_metric(batch, clipped.to(x.weights.dtype), by_completion)}


def vespo_metrics(x: PolicyLossInputs, batch: Batch) -> dict[str, Metric]:
    """Measure the mean weight of a completion; a completion without labels has weight 1, because its log-ratio is 0."""
    return {
        "vespo/phi_seq_mean": token_or_completion_mean_metric(batch, vespo_weights(x), by_completion=True, empty=1.0)
    }
