"""Token selection of Clip-Cov and KL-Cov (arXiv 2505.22617), by the covariance of log-probability and advantage.

Owns pure functions of all N learned tokens of an optimizer step, over all ranks: which tokens are selected then depends
on no layout. What the loss does with them is in `policy_loss_types.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Compute (log p - mean log p) x (A - mean A) of each token, float64 [N]."""
    logprobs = logprobs.double()
    advantages = advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def ratio_clipped_token_mask(log_ratios: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """Mark the tokens, bool [N], whose ratio the clipped surrogate bounds, so that they have no gradient in it."""
    ratios = log_ratios.double().exp()
    return ratios.clamp(1 - epsilon, 1 + epsilon_high) * advantages < ratios * advantages


def clip_cov_token_mask(covariances: Tensor, ratio: float, bounds: tuple[float, float], seed: int) -> Tensor:
    """Mark max(1, floor(ratio x N)) random tokens, bool [N], among those whose covariance is between `bounds`."""
    low, high = bounds
    candidates = ((covariances > low) & (covariances < high)).nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _selected(covariances, candidates[order[: _share(ratio, len(covariances))]])


def kl_cov_token_mask(covariances: Tensor, ratio: float) -> Tensor:
    """Mark the max(1, floor(ratio x N)) tokens of the largest covariance, bool [N]."""
    order = covariances.argsort(descending=True, stable=True)
    return _selected(covariances, order[: _share(ratio, len(covariances))])


def _share(ratio: float, count: int) -> int:
    return max(1, int(ratio * count))


def _selected(covariances: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros(covariances.shape, dtype=torch.bool).index_fill(0, chosen, True)
