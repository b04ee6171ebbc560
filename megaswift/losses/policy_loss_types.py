"""The loss types of policy optimization: the contribution of a token to the loss.

Owns the formulas; `losses/options/loss_table.py` lists the options that they read and their normalizers. Names are
those of TRL's GRPOConfig; `rloo` is TRL's RLOOTrainer, `clip_cov` and `kl_cov` are verl's. Each formula
returns one number per token, [b, s], neither masked nor reduced.

Clip-Cov and KL-Cov (arXiv 2505.22617) select tokens among all N learned tokens of an optimizer step, over all ranks, so
that the selection does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOWEST = math.log(1e-8)
"""Lower bound of the logarithm of a weight in VESPO (its authors' code, after arXiv 2602.10693)."""
HIGHEST = 20.0
"""Upper bound of the logarithm of a weight in VESPO."""
CISPO_CAP = 5.0
"""The cap that ScaleRL (arXiv 2510.13786) found good, and that TRL recommends for `epsilon_high` of CISPO."""


@dataclass(frozen=True)
class PolicySettings:
    """Numbers that loss types read."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    """As `epsilon` when None; for `cispo` the largest weight itself, `CISPO_CAP` when None."""
    delta: float | None = None
    """Largest weight of the unclipped side too (INTELLECT-2, arXiv 2505.07291)."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl_cov_coef: float = 1.0

    @property
    def high(self) -> float:
        """The upper epsilon."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def cap(self) -> float:
        """The largest weight of `cispo`."""
        return CISPO_CAP if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class PolicyLossInputs:
    """The tokens of a micro-batch as a loss sees them, [b, s] each.

    Rows are packed unless `--packing false` is given: a row holds several completions with their prompts.
    """

    logprobs: Tensor
    """Under the policy; differentiable."""
    advantages: Tensor
    weights: Tensor
    """Policy / old policy: the token's, or its completion's; differentiable."""
    completion_log_weights: Tensor
    """log of the whole completion's weight, the sampler's correction included and between `LOWEST` and `HIGHEST`; no
    gradient."""
    settings: PolicySettings
    selected: Tensor | None = None
    """bool: tokens of high covariance (`clip_cov_token_mask`, `kl_cov_token_mask`); None: not known."""
    mask: Tensor = field(kw_only=True)
    """bool: the completions' tokens that carry loss."""
    old_logprobs: Tensor = field(kw_only=True)
    """Under the policy at the time of sampling; no gradient."""
    completion_mean: Callable[[Tensor], Tensor] = field(kw_only=True)
    """The mean of a tensor [b, s] over the `mask` of each token's completion, [b, s]; differentiable."""

    @property
    def bounded(self) -> Tensor:
        """The weights, not above `delta`."""
        return self.weights if self.settings.delta is None else self.weights.clamp(max=self.settings.delta)


def _clipped(x: PolicyLossInputs) -> Tensor:
    """PPO's surrogate, arXiv 1707.06347 eq. 7; with two epsilons DAPO's, arXiv 2503.14476 eq. 8."""
    clipped = x.weights.clamp(1 - x.settings.epsilon, 1 + x.settings.high)
    return -torch.minimum(x.bounded * x.advantages, clipped * x.advantages)


def _clip_cov(x: PolicyLossInputs) -> Tensor:
    """Clip-Cov, arXiv 2505.22617: the selected tokens are left out of the clipped surrogate."""
    per_token = _clipped(x)
    return per_token if x.selected is None else per_token * ~x.selected


def _kl_cov(x: PolicyLossInputs) -> Tensor:
    """KL-Cov, arXiv 2505.22617: unclipped, with a KL penalty on the selected tokens. |log ratio| estimates the KL, as
    in the authors' code."""
    per_token = -x.weights * x.advantages
    return per_token if x.selected is None else per_token + x.settings.kl_cov_coef * x.weights.log().abs() * x.selected


def _cispo(x: PolicyLossInputs) -> Tensor:
    """CISPO, arXiv 2506.13585, with ScaleRL's upper bound alone: REINFORCE under a truncated weight."""
    return -x.weights.clamp(max=x.settings.cap).detach() * x.advantages * x.logprobs


def _sapo(x: PolicyLossInputs) -> Tensor:
    """SAPO, arXiv 2511.20347: a sigmoid gate around weight 1 in place of the clip."""
    temperature = torch.where(x.advantages > 0, x.settings.sapo_temperature_pos, x.settings.sapo_temperature_neg)
    return -torch.sigmoid(temperature * (x.weights - 1)) * 4 / temperature * x.advantages


def vespo_weights(x: PolicyLossInputs) -> Tensor:
    """Return VESPO's weights [b, s], without a gradient: w^k exp(lambda (1 - w)) of the completion's weight w, which is
    1 at w = 1 (arXiv 2602.10693)."""
    s = x.settings
    good = x.advantages >= 0
    k = torch.where(good, s.vespo_k_pos, s.vespo_k_neg)
    rate = torch.where(good, s.vespo_lambda_pos, s.vespo_lambda_neg).clamp(min=1e-4)
    log_w = x.completion_log_weights
    return torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _vespo(x: PolicyLossInputs) -> Tensor:
    """VESPO, arXiv 2602.10693: REINFORCE, each completion under a smooth function of its whole weight."""
    return -vespo_weights(x) * x.advantages * x.logprobs


@dataclass(frozen=True)
class PolicyLossType:
    """A formula, and what the ratio in it is. Its normalizer is in `losses/options/loss_table.py`."""

    formula: Callable[[PolicyLossInputs], Tensor]
    weighs_whole: bool = False
    """The weight is the whole completion's, whatever the level."""
    corrects: bool = False
    """The formula takes the sampler's mismatch into its weight, so that nothing is multiplied by it afterwards."""

    @property
    def clips(self) -> bool:
        """Has a lower and an upper bound, whose effect is reported."""
        return self.formula in (_clipped, _clip_cov)


LOSS_TYPES: dict[str, PolicyLossType] = {
    "grpo": PolicyLossType(_clipped),
    "bnpo": PolicyLossType(_clipped),
    "dr_grpo": PolicyLossType(_clipped),
    "dapo": PolicyLossType(_clipped),
    "luspo": PolicyLossType(_clipped),
    "rloo": PolicyLossType(_clipped, weighs_whole=True),
    "cispo": PolicyLossType(_cispo),
    "sapo": PolicyLossType(_sapo),
    "vespo": PolicyLossType(_vespo, corrects=True),
    "clip_cov": PolicyLossType(_clip_cov),
    "kl_cov": PolicyLossType(_kl_cov),
}
"""Under the names of grpo's rows in `losses/options/loss_table.py`."""


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
