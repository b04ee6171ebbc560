"""DPO and variants: a weighted sum of loss types over pairs that share one packed forward pass.

Owns what goes into the formulas of `dpo_loss_types.py`: sums over documents, the reference, LD-DPO's and WPO's weights,
the SFT term. Every term is divided once by its global count: pairs, or tokens of chosen answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.document_segments import (
    completion_mask,
    completion_weight_per_document,
    completion_weights,
    document_index,
    document_sums,
    masked_token_number_in_document,
    masked_tokens_per_document,
)
from megaswift.losses.dpo_loss_types import (
    ALIASES,
    LOSS_TYPES,
    SFT,
    DpoSettings,
    PairLogprobsAndRatios,
    divergence_scores,
)
from megaswift.losses.preference_pairs import (
    IMPLICIT_REWARDS,
    PAIR_COUNTS,
    PREFERENCE_LOGPS,
    PairTensors,
    chosen_and_rejected,
    implicit_reward_metrics,
    pair_and_chosen_token_counts,
    pair_count,
    preference_logp_metrics,
    split_pairs,
    token_mean_metric,
)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization. The reference's log-probabilities come in `batch.fields["reference"]`, [b, s]."""

    loss_types: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] = ()
    """One for each type; all 1 when empty."""
    settings: DpoSettings = DpoSettings()
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    """alpha of `alpha_divergence`."""
    ld_alpha: float | None = None
    """LD-DPO (arXiv 2409.06411): weight of an answer's tokens beyond the shorter answer's length."""
    use_weighting: bool = False
    """WPO (arXiv 2406.11827): weigh a pair's loss by how likely the policy is to write it; the type `sft` is no loss of
    pairs."""
    rpo_alpha: float | None = None
    """RPO (arXiv 2404.19733): weight of the type `sft`, besides the loss types."""
    reference_free: bool = False
    """Take every answer to be equally likely under the reference."""

    def __post_init__(self) -> None:
        unknown = [t for t in self.loss_types if t not in LOSS_TYPES and t not in ALIASES and t != SFT]
        assert not unknown, f"unknown loss types {unknown}"
        assert len(self.loss_weights) in (0, len(self.loss_types)), "one weight for each loss type"

    @property
    def weights(self) -> dict[str, float]:
        """Loss type -> weight; weights of a type that is named twice add up."""
        weights: dict[str, float] = {}
        given = [*zip(self.loss_types, self.loss_weights or (1.0,) * len(self.loss_types), strict=True)]
        for name, weight in given + ([] if self.rpo_alpha is None else [(SFT, self.rpo_alpha)]):
            name = ALIASES.get(name, name)
            weights[name] = weights.get(name, 0.0) + weight
        return weights

    @property
    def needs(self) -> RequestedModelOutputs:
        """Log-probabilities; the rest is for metrics and for WPO."""
        rest = frozenset({"entropy", "mean_logit"} | ({"log_sum_sq"} if self.use_weighting else set()))
        return RequestedModelOutputs(fields=rest | {"logprobs", "correct"}, without_gradient=rest)

    @property
    def reported(self) -> Reported:
        """A term for each loss type, and TRL's metrics."""
        terms = {f"loss/{name}": "chosen_tokens" if name == SFT else "pairs" for name in self.weights}
        likelihood = ("nll_loss",) if SFT in self.weights else ()
        own = Reported(PAIR_COUNTS, terms, means=("entropy", "mean_token_accuracy", *likelihood))
        return own + IMPLICIT_REWARDS + PREFERENCE_LOGPS

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `pairs` and `chosen_tokens`: tokens of the chosen answers."""
        return pair_and_chosen_token_counts(batch)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """A term for each loss type, and TRL's metrics."""
        assert outputs.logprobs is not None
        compared = self.compare(outputs.logprobs, batch)
        weight = self.pair_weights(outputs, batch)
        mask = completion_mask(batch)
        chosen, _ = chosen_and_rejected(batch, completion_weights(batch))
        metrics = {
            **implicit_reward_metrics(compared.rewards),
            **preference_logp_metrics(outputs, batch, compared.logps),
        }
        assert outputs.entropy is not None and outputs.correct is not None
        metrics["entropy"] = token_mean_metric(outputs.entropy, mask)
        metrics["mean_token_accuracy"] = token_mean_metric(outputs.correct, chosen)
        terms = []
        for name, factor in self.weights.items():
            if name == SFT:
                metrics["nll_loss"] = token_mean_metric(-outputs.logprobs, chosen)
                terms.append(LossTerm(f"loss/{name}", -(outputs.logprobs * chosen).sum(), "chosen_tokens", factor))
            else:
                terms.append(LossTerm(f"loss/{name}", (LOSS_TYPES[name](compared) * weight).sum(), "pairs", factor))
        return terms, metrics

    def compare(self, logprobs: Tensor, batch: Batch) -> PairLogprobsAndRatios:
        """Sum log-probabilities over the answers of each pair."""
        weights = completion_weights(batch).to(logprobs.dtype)
        weights = weights if self.ld_alpha is None else weights * self._verbosity_weights(batch)
        reference = torch.zeros_like(logprobs) if self.reference_free else batch.fields["reference"].to(logprobs.dtype)
        policy, base = (split_pairs(batch, document_sums(batch, x * weights)) for x in (logprobs, reference))
        ratios = split_pairs(batch, document_sums(batch, (logprobs - reference) * weights))
        lengths = split_pairs(batch, completion_weight_per_document(batch))
        return PairLogprobsAndRatios(
            policy, base, ratios, divergence_scores(ratios, self.f_divergence, self.f_alpha), lengths, self.settings
        )

    def _verbosity_weights(self, batch: Batch) -> Tensor:
        """float32 [b, s]: 1 for tokens up to the shorter answer's length, `ld_alpha` beyond."""
        assert self.ld_alpha is not None
        mask = completion_mask(batch)
        pairs = batch.fields["pairs"]
        lengths = masked_tokens_per_document(batch, mask)
        shared = lengths.index_put((pairs,), lengths[pairs].amin(1, keepdim=True).expand_as(pairs))
        within = masked_token_number_in_document(batch, mask) <= shared[document_index(batch)]
        return torch.where(within, 1.0, self.ld_alpha)

    def pair_weights(self, outputs: ModelOutputs, batch: Batch) -> Tensor:
        """Return the weight of each pair [p], without a gradient: WPO's (eq. 2), or 1."""
        assert outputs.logprobs is not None
        if not self.use_weighting:
            return torch.ones(pair_count(batch), dtype=outputs.logprobs.dtype, device=outputs.logprobs.device)
        assert outputs.log_sum_sq is not None
        mask = completion_mask(batch)
        likely = document_sums(batch, (outputs.logprobs - outputs.log_sum_sq).detach() * mask)
        means: PairTensors = split_pairs(batch, likely / masked_tokens_per_document(batch, mask).clamp(min=1))
        return (means.chosen + means.rejected).exp()
