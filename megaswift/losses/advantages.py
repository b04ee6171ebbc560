"""Advantages: from rewards of completions or tokens to the weights of the policy's loss.

Owns pure functions of float tensors: `[n]` completions of which those of one prompt follow one another, `group` of
them, or `[b, s]` tokens. A reward that is NaN was not given: it moves no mean, and its completion gets advantage 0.
Nothing here gathers over ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to standard deviations, as TRL does."""
LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio before `exp`, as in verl, slime and OpenRLHF: float32 overflows at 88."""


def mean_and_std(rewards: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation along `dim`, which is kept, over all values that are not NaN; the standard
    deviation is Bessel's, and NaN for fewer than two."""
    count = (~rewards.isnan()).sum(dim, keepdim=True)
    mean = rewards.nanmean(dim, keepdim=True)
    return mean, (
        ((rewards - mean) ** 2).nansum(dim, keepdim=True) / torch.where(count > 1, count - 1, torch.nan)
    ).sqrt()


def _scaled(rewards: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A group of one has no spread and no advantage."""
    return ((rewards - mean) / (std + EPSILON)).nan_to_num(nan=0.0)


def group_advantages(rewards: Tensor, group: int, scale: str = "group") -> Tensor:
    """Return [n]: rewards less the mean of their group, over a standard deviation.

    `scale`: the group's (arXiv 2402.03300), the batch's (arXiv 2508.08221) or none (arXiv 2503.20783).
    """
    assert scale in ("group", "batch", "none"), f"unknown scale {scale}"
    grouped = rewards.view(-1, group)
    mean, std = mean_and_std(grouped, 1)
    if scale == "none":
        return (grouped - mean).nan_to_num(nan=0.0).flatten()
    if scale == "batch":
        std = mean_and_std(rewards, 0)[1]
    return _scaled(grouped, mean, std).flatten()


def rloo_advantages(rewards: Tensor, group: int, normalize: bool = False) -> Tensor:
    """Return [n]: rewards less the mean of the others of their group (arXiv 2402.14740); `normalize` over the batch."""
    grouped = rewards.view(-1, group)
    others = (~grouped.isnan()).sum(1, keepdim=True) - 1
    advantages = (grouped - (grouped.nansum(1, keepdim=True) - grouped) / others).flatten()
    return _scaled(advantages, *mean_and_std(advantages, 0)) if normalize else advantages.nan_to_num(nan=0.0)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return [n, t]: at each token in `mask` the sum of its reward and of those of later tokens, each later token
    discounted once more."""
    returns = torch.zeros_like(rewards)
    after = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        after = torch.where(mask[:, t], rewards[:, t] + gamma * after, after)
        returns[:, t] = after * mask[:, t]
    return returns


def reinforce_plus_plus(rewards: Tensor, totals: Tensor, mask: Tensor, group: int = 1, gamma: float = 1.0) -> Tensor:
    """Return the advantages of tokens, [n, t] (REINFORCE++, arXiv 2501.03262 eq. 8 to 10).

    The return of a token is the sum of the rewards from it on, so that the KL counts from the token on and not from the
    beginning. Returns are normalized over all tokens in `mask`.

    Args:
        rewards: [n, t], a completion's score at its last token, less what the KL costs at each.
        totals: [n], the score of each completion without the KL; NaN where there is none.
        mask: bool [n, t], own tokens.
        group: above 1 the mean score of a group is taken off at the last token of each completion (the same authors'
            REINFORCE++-baseline).
        gamma: discount for each token.
    """
    known = mask & ~totals.isnan().unsqueeze(1)
    if group > 1:
        baseline = mean_and_std(totals.view(-1, group), 1)[0].nan_to_num(nan=0.0).expand(-1, group).reshape(-1, 1)
        places = torch.arange(mask.shape[1], device=mask.device) * mask
        last = mask & (places == places.amax(1, keepdim=True))
        rewards = rewards - baseline * last
    return whiten(discounted_returns(rewards * known, known, gamma), known)


def weighted_sum(per_function: Tensor, weights: Tensor) -> Tensor:
    """Sum rewards [n, functions] with weights [functions] to [n]; NaN where no function gave a reward."""
    return (per_function * weights).nansum(1).masked_fill(per_function.isnan().all(1), torch.nan)


def multi_reward_group_advantages(
    per_function: Tensor, weights: Tensor, group: int, how: str, scale: str = "group"
) -> Tensor:
    """Return [n]: group advantages of several rewards [n, functions], with a weight each.

    `how`: `sum_then_normalize`, or `normalize_then_sum` (GDPO, arXiv 2601.05242), which normalizes each function within
    its group and the weighted sum over the batch, and does not read `scale`.
    """
    if how == "sum_then_normalize":
        return group_advantages(weighted_sum(per_function, weights), group, scale)
    assert how == "normalize_then_sum", f"unknown aggregation {how}"
    grouped = per_function.view(-1, group, per_function.shape[1])
    mean, std = mean_and_std(grouped, 1)
    normalized = ((grouped - mean) / (std + EPSILON)).view_as(per_function)
    total = (normalized * weights).nansum(1).masked_fill(per_function.isnan().all(1), torch.nan)
    return _scaled(total, *mean_and_std(total, 0))


def groups_without_spread(rewards: Tensor, group: int) -> Tensor:
    """Return bool [groups]: True where all rewards are the same up to rounding, so that the advantages are 0."""
    std = mean_and_std(rewards.view(-1, group), 1)[1].squeeze(1)
    return std.isclose(torch.zeros_like(std))


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy, reference) at each token from log-probabilities of what the policy wrote.

    Named as in Schulman's note "Approximating KL divergence" (2020): k1 and k3 are unbiased, k2 and k3 never negative.
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    assert kind == "k3", f"unknown estimator {kind}"
    difference = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.exp(-difference) + difference - 1


def kl_penalized_token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor, documents: Tensor) -> Tensor:
    """Return [b, s]: minus the penalty at each token in `mask`, and a completion's score at its last one (InstructGPT,
    arXiv 2203.02155).

    Args:
        scores: [documents], of every document of the batch; read where it has a token in the mask.
        penalties: [b, s], such as coefficient x KL.
        mask: bool [b, s].
        documents: int64 [b, s], `document_index` of the batch.
    """
    chosen = mask.flatten().nonzero().squeeze(1)
    of = documents.flatten()[chosen]
    last = torch.ones_like(of, dtype=torch.bool)
    last[:-1] = of[1:] != of[:-1]
    given = torch.zeros_like(penalties).flatten().index_add(0, chosen[last], scores.to(penalties.dtype)[of[last]])
    return given.view_as(penalties) - penalties * mask


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, [b, s] each, by generalized advantage estimation (arXiv 1506.02438 eq. 16) over
    the tokens in `mask`.

    The token after a masked one is the next in the mask: what tools write passes no time. A document ends its episode;
    `documents`, int64 [b, s], numbers the documents of a row.
    """
    advantages = torch.zeros_like(values)
    after = values.new_zeros(values.shape[0])
    carried = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        if documents is not None and t + 1 < values.shape[1]:
            goes_on = documents[:, t] == documents[:, t + 1]
            after = after * goes_on
            carried = carried * goes_on
        now = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * carried
        carried = torch.where(mask[:, t], now, carried)
        after = torch.where(mask[:, t], values[:, t], after)
        advantages[:, t] = now * mask[:, t]
    return advantages, (advantages + values) * mask


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return float64 [3]: count, sum and sum of squares of x in `mask`; these add up over micro-batches and ranks."""
    chosen = x[mask].double()
    return torch.stack([chosen.new_tensor(float(chosen.numel())), chosen.sum(), (chosen**2).sum()])


def whiten(x: Tensor, mask: Tensor, total: Tensor | None = None, shift_mean: bool = True) -> Tensor:
    """Divide x [b, s] by its standard deviation in `mask`; the result is 0 elsewhere. The mean is 0, or stays what it
    was without `shift_mean`.

    `total`: the `masked_moments` of everything that is whitened together, if that is more than x.
    """
    count, added, squares = masked_moments(x, mask) if total is None else total
    mean = added / count.clamp(min=1)
    variance = ((squares - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (x.double() - mean) * (variance + 1e-8).rsqrt()
    return (whitened if shift_mean else whitened + mean).to(x.dtype) * mask


def entropy_threshold(entropies: Tensor, share: float) -> Tensor:
    """Return the entropy (0-d) that the `share` of all tokens with the highest entropy reaches (arXiv 2506.01939).

    [k]: of all completion tokens.

    The quantile 1 - share, linear between neighbours; `torch.quantile` takes 16 million numbers at most.
    """
    ordered = entropies.float().sort().values
    place = (1 - share) * (len(entropies) - 1)
    low = ordered[math.floor(place)]
    high = ordered[math.ceil(place)]
    return torch.lerp(low, high, place - math.floor(place))


def next_kl_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the next KL coefficient by the adaptive controller of arXiv 1909.08593, section 2.2. It rises by at most a
    fifth of samples / horizon where KL exceeds its target."""
    return coefficient * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)
