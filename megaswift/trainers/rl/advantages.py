"""Computes per-token fields from rewards: advantages, value targets, and correction weights for the sampler mismatch.

Owns how completions become tensors: [n, t], own tokens from the left. The estimators are in
`megaswift.losses.advantage_estimators`. The same on every rank, as its input is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megaswift.data.prompts.collate import RolloutTokens
from megaswift.losses import advantages as formulas
from megaswift.losses.advantage_estimators import EstimatorInput, estimate_advantage_fields
from megaswift.losses.options.estimator_table import advantage_estimator_entry
from megaswift.losses.policy_loss_types import (
    clip_cov_token_mask,
    kl_cov_token_mask,
    ratio_clipped_token_mask,
    token_covariances,
)
from megaswift.trainers.rl.options.rl import RlConfig
from megaswift.trainers.rl.scorer import ScoredCompletion
from megaswift.trainers.rl.settings import RlSettings, correction_of

_TokenFields = dict[str, list[np.ndarray]]
"""By field, the numbers of each completion's own tokens."""


@dataclass
class AdvantageEstimator:
    """The estimator of a run. Its only state is `beta`, the weight of the divergence, which a controller may change."""

    rl: RlConfig
    settings: RlSettings
    beta: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def __call__(self, rollouts: Sequence[ScoredCompletion], completed: Sequence[RolloutTokens]) -> _TokenFields:
        """Return the field `advantages`, and the other fields that the run's losses read."""
        mask = trained_token_mask(completed)
        penalties = self.penalties(completed, mask)
        estimated = estimate_advantage_fields(
            self.settings.estimator, self.inputs(rollouts, completed, (penalties, mask))
        )
        if advantage_estimator_entry(self.settings.estimator).teacher:
            gap = estimated["advantages"]
            self.metrics["teacher_kl"] = -float(gap[mask].mean()) if bool(mask.any()) else 0.0
        if self.settings.corrects:
            gap = padded_field(completed, "old", mask) - padded_field(completed, "sampled", mask)
            estimated["ratio"] = correction_of(self.rl).weights(gap, mask)
        return {
            name: [row[own].numpy() for row, own in zip(values.float(), mask, strict=True)]
            for name, values in estimated.items()
        }

    def penalties(self, completed: Sequence[RolloutTokens], mask: Tensor) -> Tensor:
        """Return each token's penalty for its divergence from the reference, [n, t]; also update the controller."""
        if not self.settings.kl_in_reward:
            return torch.zeros(mask.shape)
        kl = (
            formulas.kl_estimate(
                padded_field(completed, "old", mask),
                padded_field(completed, "reference", mask),
                self.settings.kl_estimator,
            )
            * mask
        )
        cost = self.beta * kl
        rl = self.rl
        per_completion = float(kl.sum(1).mean())
        self.metrics = {
            "kl": float(kl.sum() / mask.sum().clamp(min=1)),
            "objective/kl": per_completion,
            "objective/kl_coef": self.beta,
        }
        if rl.kl_controller == "adaptive":
            self.beta = formulas.next_kl_coefficient(
                self.beta, per_completion, rl.target_kl, len(completed), rl.kl_horizon
            )
        return cost

    def inputs(
        self, rollouts: Sequence[ScoredCompletion], completed: Sequence[RolloutTokens], tokens: tuple[Tensor, Tensor]
    ) -> EstimatorInput:
        """Collect what the estimators read; `tokens`: the KL penalties and the mask, [n, t] each."""
        penalties, mask = tokens
        rl = self.rl
        entry = advantage_estimator_entry(self.settings.estimator)
        names = [*rollouts[0].rewards] if self.settings.each_reward else []
        weights = [*self.settings.reward_weights][
            : len(names)
        ]  # an environment's own reward comes last, and has weight 1
        return EstimatorInput(
            totals=torch.tensor([r.total for r in rollouts]),
            per_function=torch.tensor([[r.rewards[n] for n in names] for r in rollouts]),
            weights=torch.tensor([*weights, *[1.0] * (len(names) - len(weights))]),
            token_rewards=penalized_rewards_by_token(rollouts, penalties, mask) if entry.per_token else penalties,
            penalties=penalties,
            mask=mask,
            lengths=torch.tensor([c.count for c in completed]),
            values=padded_field(completed, "values", mask) if entry.critic else None,
            baselines=torch.tensor([r.baseline for r in rollouts]) if entry.greedy_baseline else None,
            teacher_gap=padded_field(completed, "teacher", mask) - padded_field(completed, "old", mask)
            if entry.teacher
            else None,
            group=self.settings.group,
            whiten=self.settings.whitens,
            options=rl,
        )

    def select_tokens(
        self,
        logprobs: Sequence[np.ndarray],
        advantages: Sequence[np.ndarray],
        old: Sequence[np.ndarray],
        seed: Sequence[int],
    ) -> list[np.ndarray]:
        """Select tokens by clip_cov or kl_cov: bool [own tokens] for each completion. `old`: log-probabilities of the
        old policy; `seed` identifies the step."""
        if not logprobs:
            return []
        now, advantage, before = [torch.from_numpy(np.concatenate(values)) for values in (logprobs, advantages, old)]
        rl = self.rl
        covariances = token_covariances(now, advantage)
        if self.settings.loss_type == "kl_cov":
            chosen = kl_cov_token_mask(covariances, rl.kl_cov_ratio)
        else:
            number = int(np.random.SeedSequence(seed).generate_state(1)[0])
            high = rl.epsilon if rl.epsilon_high is None else rl.epsilon_high
            # Tokens that the ratio clips are not selected, as in verl.
            clipped = ratio_clipped_token_mask(now - before, advantage, rl.epsilon, high)
            covariances = covariances.masked_fill(clipped, -torch.inf)
            chosen = clip_cov_token_mask(covariances, rl.clip_cov_ratio, (rl.clip_cov_lb, rl.clip_cov_ub), number)
        return np.split(chosen.numpy(), np.cumsum([len(v) for v in logprobs])[:-1])

    def state_dict(self) -> dict[str, float]:
        """Return the weight of the divergence."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.beta = float(state["beta"])


def penalized_rewards_by_token(rollouts: Sequence[ScoredCompletion], penalties: Tensor, mask: Tensor) -> Tensor:
    """Return [n, t]: rewards of tokens and turns where they stand, those of a completion at its last token, less what
    the divergence costs."""
    documents = torch.arange(len(rollouts)).unsqueeze(1).expand(mask.shape)
    by_token = [r.by_token for r in rollouts]
    at_end = torch.tensor([r.total if tokens is None else 0.0 for r, tokens in zip(rollouts, by_token, strict=True)])
    at_end = at_end.nan_to_num(nan=0.0)  # of a completion that no reward function applies to
    rewards = formulas.kl_penalized_token_rewards(at_end, penalties, mask, documents)
    for row, own, tokens in zip(rewards, mask, by_token, strict=True):
        if tokens is not None and bool(own.any()):
            row[own] += torch.tensor(tokens)
    return rewards


def trained_token_mask(completed: Sequence[RolloutTokens]) -> Tensor:
    """Mark the places of own tokens, bool [n, t], from the left; completions without loss have none."""
    counts = torch.tensor([0 if c.silent else c.count for c in completed])
    return torch.arange(max(1, int(counts.max()))) < counts.unsqueeze(1)


def padded_field(completed: Sequence[RolloutTokens], name: str, mask: Tensor) -> Tensor:
    """Place a field of all completions in float32 [n, t], 0 elsewhere."""
    values = [c.values[name] for c in completed if not c.silent]
    flat = torch.from_numpy(np.concatenate(values)) if values else torch.zeros(0)
    return torch.zeros(mask.shape).masked_scatter(mask, flat)
