"""Policy losses: GRPO and variants, RLOO, and PPO's policy loss, over completions with given advantages.

Owns what goes into the formulas of `policy_loss_types.py`: weights of tokens or completions, masks, the KL to the
reference, the bonus for entropy. It reads these `batch.fields`: `completions` (int64 [n], document numbers; fillers
left out) and, [b, s] each, `advantages`; `old` (log-probabilities of the policy that counts as the old one; absent
where that is this policy), `sampled` (the sampler's own), `ratio` (weights against the sampler's mismatch),
`reference`, `keep` (bool: tokens that the policy learns from), `selected` (bool: tokens of high covariance), where they
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.losses.advantages import LARGEST_LOG_RATIO, kl_estimate
from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.document_segments import document_index, document_sums, masked_tokens_per_document
from megaswift.losses.options.loss_table import (
    AGG_MODES,
    SEQ_MEAN_TOKEN_MEAN,
    SEQ_MEAN_TOKEN_SUM_NORM,
    TOKEN_MEAN,
    loss_entries,
)
from megaswift.losses.policy_loss_types import (
    HIGHEST,
    LOSS_TYPES,
    LOWEST,
    PolicyLossInputs,
    PolicyLossType,
    PolicySettings,
)
from megaswift.losses.policy_metrics import (
    CISPO_CLIPPED,
    CLIPPED,
    VESPO_WEIGHTS,
    cispo_clip_metrics,
    clip_metrics,
    token_mean_per_completion,
    vespo_metrics,
)
from megaswift.losses.preference_pairs import token_mean_metric
from megaswift.losses.sampler_correction import (
    CORRECTION_WEIGHTS,
    LOGPROB_GAP,
    correction_weight_metrics,
    logprob_gap_metrics,
)

LEVELS = ("token", "sequence", "sequence_token")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a policy; its options have the names of TRL's GRPOConfig."""

    loss_type: str = "dapo"
    settings: PolicySettings = PolicySettings()
    importance_sampling_level: str = "token"
    """`sequence`: GSPO (arXiv 2507.18071), one weight a completion, the geometric mean of its tokens' weights.
    `sequence_token`: GSPO-token (eq. 13 to 15 there), the same value with the gradient of each token's own
    log-probability, so that advantages may differ from token to token."""
    beta: float = 0.0
    """Weight of the KL to the reference."""
    kl_in_reward: bool = False
    """The KL is in the rewards already: no term here."""
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    """Multiply the KL by the weights (DeepSeek-V3.2, arXiv 2512.02556)."""
    off_policy_mask_threshold: float | None = None
    """Drop completions of negative advantage whose mean log-ratio, sampler to policy, exceeds this (arXiv
    2512.02556)."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of the tokens that the policy learns from, which is to grow."""
    max_completion_length: int | None = None
    """By which `seq-mean-token-sum-norm` divides."""
    temperature: float = 1.0
    """At which completions were sampled."""
    ratio_level: str = "token"
    """`sequence`: each `ratio` is its whole completion's."""
    knows_sampler: bool = True
    """Batches of this run have `sampled`."""
    corrects: bool = False
    """Batches of this run have `ratio`."""
    loss_agg_mode: str | None = None
    """The normalizer, one of `AGG_MODES`; None: that of the loss type."""

    def __post_init__(self) -> None:
        assert self.loss_type in LOSS_TYPES, f"unknown loss type {self.loss_type}"
        assert self.importance_sampling_level in LEVELS, f"unknown level {self.importance_sampling_level}"
        assert self.ratio_level in LEVELS[:2], f"unknown level {self.ratio_level}"
        assert self.agg_mode in AGG_MODES, f"unknown loss_agg_mode {self.agg_mode}"
        fixed = self.agg_mode == SEQ_MEAN_TOKEN_SUM_NORM
        assert self.max_completion_length or not fixed, f"{self.agg_mode} needs max_completion_length"

    @property
    def kind(self) -> PolicyLossType:
        """The loss type."""
        return LOSS_TYPES[self.loss_type]

    @property
    def agg_mode(self) -> str:
        """The normalizer."""
        return self.loss_agg_mode or str(loss_entries("grpo", (self.loss_type,))[0].loss_agg_mode)

    @property
    def needs(self) -> RequestedModelOutputs:
        """Log-probabilities at the sampling temperature, and the entropy."""
        metric = frozenset() if self.entropy_coef else frozenset({"entropy"})
        return RequestedModelOutputs(frozenset({"logprobs", "entropy"}), metric, self.temperature)

    @property
    def has_kl(self) -> bool:
        """The KL to the reference is a term."""
        return self.beta != 0 and not self.kl_in_reward

    @property
    def by_completion(self) -> bool:
        """All tokens of a completion have the same weight."""
        return self.importance_sampling_level != "token" or self.kind.weighs_whole

    @property
    def reported(self) -> Reported:
        """Terms for the policy, the KL and the entropy, and TRL's metrics."""
        divided_by = "completion_tokens" if self.agg_mode == TOKEN_MEAN else "completions"
        reported = Reported(("completions", "completion_tokens"), {"loss/policy": divided_by}, means=("entropy",))
        if self.kind.clips:
            reported += CLIPPED
        elif self.loss_type == "cispo":
            reported += CISPO_CLIPPED
        elif self.loss_type == "vespo":
            reported += VESPO_WEIGHTS
        if self.knows_sampler:
            reported += LOGPROB_GAP
        if self.corrects:
            reported += CORRECTION_WEIGHTS
        if self.has_kl:
            reported += Reported((), {"loss/kl": divided_by}, means=("kl",))
        if self.entropy_coef:
            reported += Reported(("kept_tokens",), {"loss/entropy": "kept_tokens"})
        return reported

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `completions`, those without a label included; `completion_tokens`; and `kept_tokens` for the
        entropy."""
        counts = {
            "completions": float(batch.fields["completions"].numel()),
            "completion_tokens": float(batch.label_tokens),
        }
        return counts | ({"kept_tokens": float(_kept(batch).sum())} if self.entropy_coef else {})

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """Terms for the policy, the KL and the entropy, and TRL's metrics."""
        assert outputs.logprobs is not None and outputs.entropy is not None
        mask = batch.loss_weights != 0
        trained = _kept(batch)
        logprobs = outputs.logprobs
        old = batch.fields["old"].to(logprobs.dtype) if "old" in batch.fields else logprobs.detach()
        x = self.weigh(logprobs, old, batch)
        per_token = self.kind.formula(x) * trained * self._close_enough(x, old, batch)
        if "ratio" in batch.fields and not self.kind.corrects:
            per_token = per_token * batch.fields["ratio"].to(old.dtype)
        terms = [self._term("loss/policy", per_token, batch)]
        metrics: dict[str, Metric] = {
            "entropy": token_mean_metric(outputs.entropy, mask),
            **self._metrics(x, old, batch),
        }
        if self.has_kl:
            kl = kl_estimate(logprobs, batch.fields["reference"].to(old.dtype), self.kl_estimator)
            kl = kl * x.weights if self.use_bias_correction_kl else kl
            metrics["kl"] = token_mean_metric(kl, mask)
            terms.append(self._term("loss/kl", kl, batch, self.beta))
        if self.entropy_coef:
            terms.append(LossTerm("loss/entropy", -(outputs.entropy * trained).sum(), "kept_tokens", self.entropy_coef))
        return terms, metrics

    def weigh(self, logprobs: Tensor, old: Tensor, batch: Batch) -> PolicyLossInputs:
        """Prepare the input of the formulas from log-probabilities [b, s] of the policy and of the old policy."""
        mask = batch.loss_weights != 0
        log_ratio = torch.where(mask, logprobs - old, 0.0)
        whole = self._completion_log_weights(log_ratio.detach(), batch) if self.kind.corrects else torch.zeros_like(old)
        if self.kind.weighs_whole:
            log_ratio = document_sums(batch, log_ratio)[document_index(batch)]
        elif self.importance_sampling_level == "sequence":
            log_ratio = self._completion_mean(log_ratio, batch)
        elif self.importance_sampling_level == "sequence_token":
            log_ratio = self._completion_mean(log_ratio.detach(), batch) + (log_ratio - log_ratio.detach())
        bounded = torch.where(mask, log_ratio, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        advantages = batch.fields["advantages"].to(old.dtype)
        return PolicyLossInputs(
            logprobs,
            advantages,
            bounded.exp(),
            whole,
            self.settings,
            batch.fields.get("selected"),
            mask=mask,
            old_logprobs=old,
            completion_mean=lambda x: self._completion_mean(torch.where(mask, x, 0.0), batch),
        )

    def _completion_mean(self, x: Tensor, batch: Batch) -> Tensor:
        """[b, s]: the mean over the labeled tokens of each token's completion of x, which is 0 elsewhere."""
        lengths = masked_tokens_per_document(batch, batch.loss_weights != 0).clamp(min=1)
        return (document_sums(batch, x) / lengths)[document_index(batch)]

    def _completion_log_weights(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """[b, s]: log(policy / old), and log(old / sampler) where that was corrected, of the completion of each
        token."""
        total = document_sums(batch, log_ratio.clamp(-HIGHEST, HIGHEST))[document_index(batch)]
        if "ratio" in batch.fields:
            log_correction = batch.fields["ratio"].to(log_ratio.dtype).log().clamp(LOWEST, HIGHEST) * (
                batch.loss_weights != 0
            )
            if self.ratio_level == "sequence":
                total = total + self._completion_mean(log_correction, batch)
            else:
                total = total + document_sums(batch, log_correction)[document_index(batch)]
        return total.clamp(LOWEST, HIGHEST)

    def _close_enough(self, x: PolicyLossInputs, old: Tensor, batch: Batch) -> Tensor:
        """[b, s] or 0-d: 0 for tokens of completions that are dropped. Both the sampler and earlier steps may have led
        away."""
        if self.off_policy_mask_threshold is None:
            return old.new_ones(())
        since = batch.fields.get("sampled", old).to(old.dtype) - x.logprobs.detach()
        mean = self._completion_mean(since.nan_to_num(nan=0.0) * (batch.loss_weights != 0), batch)
        return ((x.advantages >= 0) | (mean <= self.off_policy_mask_threshold)).to(old.dtype)

    def _term(self, name: str, per_token: Tensor, batch: Batch, weight: float = 1.0) -> LossTerm:
        mask = batch.loss_weights != 0
        mode = self.agg_mode
        mean = mode == SEQ_MEAN_TOKEN_MEAN
        total = token_mean_per_completion(batch, per_token, mask).sum() if mean else (per_token * mask).sum()
        denominator = "completion_tokens" if mode == TOKEN_MEAN else "completions"
        fixed = mode == SEQ_MEAN_TOKEN_SUM_NORM
        return LossTerm(name, total, denominator, weight / (self.max_completion_length or 1) if fixed else weight)

    def _metrics(self, x: PolicyLossInputs, old: Tensor, batch: Batch) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if self.kind.clips:
            metrics |= clip_metrics(x, batch, self.by_completion)
        elif self.loss_type == "cispo":
            metrics |= cispo_clip_metrics(x, batch, self.by_completion)
        elif self.loss_type == "vespo":
            metrics |= vespo_metrics(x, batch)
        if "sampled" in batch.fields:
            metrics |= logprob_gap_metrics(old, batch)
        if "ratio" in batch.fields:
            metrics |= correction_weight_metrics(batch, self.ratio_level)
        return metrics


def _kept(batch: Batch) -> Tensor:
    """bool [b, s]: labeled tokens that the policy learns from."""
    mask = batch.loss_weights != 0
    return mask & batch.fields["keep"] if "keep" in batch.fields else mask
