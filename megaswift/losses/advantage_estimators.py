"""Advantage estimators by name: from the rewards of a generation to advantages and value targets.

Owns which formula an estimator is, over tensors alone; the rows of `losses/options/estimator_table.py` have the same
names. The formulas that have other uses are in `advantages.py`. Completions of one prompt follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaswift.base.registry import Registry
from megaswift.base.user_code import convert_user_code_errors, defined_at
from megaswift.errors import PluginError, Problem
from megaswift.losses import advantages as formulas
from megaswift.losses.options.estimator_table import PLUGIN_ESTIMATORS
from megaswift.trainers.rl.options.rl import RlConfig


@dataclass(frozen=True)
class EstimatorInput:
    """A generation of n completions with up to t own tokens each. NaN: a reward that was not given."""

    totals: Tensor
    """[n]: weighted sums of the reward functions, without the KL penalty."""
    per_function: Tensor
    """[n, functions]: the reward functions apart; [n, 0] unless `multi_objective_aggregation` needs them."""
    weights: Tensor
    """[functions]."""
    token_rewards: Tensor
    """[n, t]: each token's reward less its KL penalty; a completion's total is at its last token."""
    penalties: Tensor
    """[n, t]: the KL penalty of each token."""
    mask: Tensor
    """bool [n, t]: own tokens that carry loss."""
    lengths: Tensor
    """int64 [n]: own tokens of each completion, those without loss included."""
    values: Tensor | None
    """[n, t]: the critic's."""
    baselines: Tensor | None
    """[n]: the total of the greedy completion of the same prompt; None unless the estimator needs it."""
    group: int
    """Completions of a prompt."""
    whiten: bool
    options: RlConfig
    teacher_gap: Tensor | None = None
    """[n, t]: the teacher's log-probability of each token less the policy's; None unless the estimator needs it."""

    @property
    def rewards(self) -> Tensor:
        """[n]: the rewards less the KL penalty of the whole completion."""
        return self.totals - self.penalties.sum(1)


Estimate = Tensor | Mapping[str, Tensor]
"""Advantages, [n] or [n, t]; or by field, where there is more than `advantages`."""
Estimator = Callable[[EstimatorInput], Estimate]
ESTIMATORS: Registry[Estimator] = Registry("advantage_estimator")


@ESTIMATORS.add("grpo")
def _grpo(x: EstimatorInput) -> Tensor:
    """Rewards less the mean of their group, scaled (arXiv 2402.03300; GDPO, arXiv 2601.05242)."""
    how = x.options.multi_objective_aggregation
    if how == "normalize_then_sum":
        return formulas.multi_reward_group_advantages(x.per_function, x.weights, x.group, how)
    return formulas.group_advantages(x.rewards, x.group, x.options.scale_rewards)


@ESTIMATORS.add("rloo")
def _rloo(x: EstimatorInput) -> Tensor:
    """Leave-one-out baseline (arXiv 2402.14740)."""
    return formulas.rloo_advantages(x.rewards, x.group, x.whiten)


@ESTIMATORS.add("reinforce_plus_plus")
def _reinforce_plus_plus(x: EstimatorInput) -> Tensor:
    """Whitened returns of tokens (arXiv 2501.03262)."""
    return formulas.reinforce_plus_plus(x.token_rewards, x.totals, x.mask, x.group, x.options.gamma)


@ESTIMATORS.add("opo")
def _opo(x: EstimatorInput) -> Tensor:
    """Rewards less the optimal baseline, the mean reward of the group weighted by length (arXiv 2505.23585)."""
    rewards = x.rewards.view(-1, x.group)
    lengths = x.lengths.view(-1, x.group)
    weights = (lengths * ~rewards.isnan()).to(rewards.dtype)
    baseline = (weights * rewards.nan_to_num(nan=0.0)).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    return (rewards - baseline).nan_to_num(nan=0.0).flatten()


@ESTIMATORS.add("remax")
def _remax(x: EstimatorInput) -> Tensor:
    """Returns of tokens less the reward of the prompt's greedy completion (arXiv 2310.10505); 0 where either reward was
    not given. The KL penalty, where rewards have one, is not part of the baseline."""
    assert x.baselines is not None
    returns = (x.token_rewards * x.mask).flip(1).cumsum(1).flip(1)
    known = ~(x.totals + x.baselines).isnan()
    return (returns - x.baselines.unsqueeze(1)).masked_fill(~(x.mask & known.unsqueeze(1)), 0.0)


@ESTIMATORS.add("teacher_kl")
def _teacher_kl(x: EstimatorInput) -> Tensor:
    """log p of the teacher less log p of the policy: what a token adds to the reverse KL, negated (MiniLLM, arXiv
    2306.08543, equation 2, without later tokens)."""
    assert x.teacher_gap is not None
    return x.teacher_gap


@ESTIMATORS.add("pass_at_k")
def _pass_at_k(x: EstimatorInput) -> Tensor:
    """The mean advantage of a completion over all sets of k in its group that hold it, where a set is worth 1 if any of
    it passes (arXiv 2508.10751, analytical derivation). 0 where no set passes, or all do."""
    k = x.options.pass_at_k
    advantages = torch.zeros_like(x.totals)
    for start in range(0, len(x.totals), x.group):
        rewards = x.totals[start : start + x.group]
        given = ~rewards.isnan()
        passed = rewards > 0
        n = int(given.sum())
        failures = int((given & ~passed).sum())
        if n < k or not k <= failures < n:
            continue
        mean = 1 - math.comb(failures, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean))
        all_fail = math.comb(failures - 1, k - 1) / math.comb(n - 1, k - 1)
        of_group = torch.where(passed, (1 - mean) / std, (1 - mean - all_fail) / std)
        advantages[start : start + x.group] = torch.where(given, of_group, 0.0)
    return advantages


@ESTIMATORS.add("gae")
def _gae(x: EstimatorInput) -> Mapping[str, Tensor]:
    """Advantages and returns by the critic's values (arXiv 1506.02438)."""
    assert x.values is not None
    rewards = x.token_rewards
    if x.options.whiten_rewards:
        rewards = formulas.whiten(rewards, x.mask, shift_mean=False)
    advantages, returns = formulas.gae(rewards, x.values, x.mask, x.options.gamma, x.options.lam)
    return {"advantages": formulas.whiten(advantages, x.mask) if x.whiten else advantages, "returns": returns}


def estimate_advantage_fields(name: str, x: EstimatorInput) -> dict[str, Tensor]:
    """Return `advantages` and any further fields of the estimator, [n, t] each.

    Raises:
        PluginError: An estimator of the user's fails or returns something else.
    """
    estimator = ESTIMATORS.get(name)
    if name not in PLUGIN_ESTIMATORS:
        estimate = estimator(x)
    else:
        what = f"--advantage_estimator {name}"
        where = f"the estimator of {defined_at(estimator) or type(estimator).__name__}"
        with convert_user_code_errors(lambda trace: PluginError(Problem(what, f"{where} failed\n{trace}"))):
            estimate = estimator(replace(x, mask=x.mask.clone()))  # it may change its input in place
        if fault := _fault_of_estimate(estimate, x):
            n, t = x.mask.shape
            fix = f"return advantages as a tensor of shape [{n}], one per completion, or [{n}, {t}], one per token"
            raise PluginError(Problem(what, f"{where} returned {fault}", fix))
    fields = {"advantages": estimate} if isinstance(estimate, Tensor) else dict(estimate)
    return {k: (v if v.dim() == 2 else v.unsqueeze(1).expand(x.mask.shape)).detach() for k, v in fields.items()}


def _fault_of_estimate(estimate: object, x: EstimatorInput) -> str:
    """Return what is wrong with what an estimator returned; empty where nothing is."""
    fields = {"advantages": estimate} if not isinstance(estimate, Mapping) else dict(estimate)
    if "advantages" not in fields:
        return f"a mapping without advantages, with {', '.join(map(repr, fields)) or 'nothing'}"
    for name, values in fields.items():
        what = "" if len(fields) == 1 else f"{name} as "
        if not isinstance(values, Tensor):
            return f"{what}{type(values).__name__}, not a tensor"
        if tuple(values.shape) not in (tuple(x.mask.shape), tuple(x.totals.shape)):
            return f"{what}a tensor of shape {[*values.shape]}"
        if values.is_complex() or values.dtype == torch.bool:
            return f"{what}a tensor of {str(values.dtype).removeprefix('torch.')}"
        each = values if values.dim() == 2 else values.unsqueeze(1).expand(x.mask.shape)
        if not bool(each[x.mask].isfinite().all()):
            return f"{what}numbers that are not finite"
    return ""
