"""CPO and SimPO: preference losses without a reference model, with an optional NLL term on the chosen completions.

Owns the loss types of TRL's CPOConfig, AlphaPO's reward among them. Terms are divided by the global counts of pairs,
and of tokens of chosen answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.document_segments import completion_weight_per_document, completion_weights, document_sums
from megaswift.losses.dpo_loss_types import label_smoothed_sigmoid_loss
from megaswift.losses.preference_pairs import (
    IMPLICIT_REWARDS,
    PAIR_COUNTS,
    PREFERENCE_LOGPS,
    PairTensors,
    chosen_and_rejected,
    implicit_reward_metrics,
    pair_and_chosen_token_counts,
    preference_logp_metrics,
    split_pairs,
    token_mean_metric,
)


@dataclass(frozen=True)
class CpoLossType:
    """A formula and the log-probabilities that it compares."""

    formula: Callable[[PairTensors, CPO], Tensor]
    """(the two rewards, before beta, [p] each; settings) -> [p]."""
    per_token: bool = False
    """Log-probabilities are means over an answer's tokens, not sums."""


@dataclass(frozen=True)
class CPO:
    """Contrastive preference optimization (arXiv 2401.08417) and what became of it."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    cpo_alpha: float = 1.0
    """Weight of the chosen answers' cross-entropy."""
    simpo_gamma: float = 0.5
    """SimPO's margin."""
    alpha: float = 0.0
    """AlphaPO (arXiv 2501.03884): the reward is (1 - p^-alpha) / alpha; at 0 its limit, log p."""
    needs: RequestedModelOutputs = RequestedModelOutputs(
        fields=frozenset({"logprobs", "mean_logit"}), without_gradient=frozenset({"mean_logit"})
    )

    def __post_init__(self) -> None:
        assert self.loss_type in LOSS_TYPES, f"unknown loss type {self.loss_type}"

    @property
    def reported(self) -> Reported:
        """The preference, the cross-entropy where it has a weight, and TRL's metrics."""
        own = Reported(PAIR_COUNTS, {f"loss/{self.loss_type}": "pairs"})
        if self.cpo_alpha:
            own += Reported((), {"loss/sft": "chosen_tokens"}, means=("nll_loss",))
        return own + IMPLICIT_REWARDS + PREFERENCE_LOGPS

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `pairs` and `chosen_tokens`: tokens of the chosen answers."""
        return pair_and_chosen_token_counts(batch)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The preference, the cross-entropy where it has a weight, and TRL's metrics."""
        assert outputs.logprobs is not None
        kind = LOSS_TYPES[self.loss_type]
        logps = self._logps(outputs.logprobs, batch, kind.per_token)
        rewards = PairTensors(self._reward(logps.chosen), self._reward(logps.rejected))
        terms = [LossTerm(f"loss/{self.loss_type}", kind.formula(rewards, self).sum(), "pairs")]
        metrics = {**implicit_reward_metrics(self.beta * rewards), **preference_logp_metrics(outputs, batch, logps)}
        if self.cpo_alpha:
            chosen, _ = chosen_and_rejected(batch, completion_weights(batch))
            terms.append(LossTerm("loss/sft", -(outputs.logprobs * chosen).sum(), "chosen_tokens", self.cpo_alpha))
            metrics["nll_loss"] = token_mean_metric(-outputs.logprobs, chosen)
        return terms, metrics

    def _logps(self, logprobs: Tensor, batch: Batch, per_token: bool) -> PairTensors:
        sums = split_pairs(batch, document_sums(batch, logprobs * completion_weights(batch)))
        return sums / split_pairs(batch, completion_weight_per_document(batch)) if per_token else sums

    def _reward(self, logps: Tensor) -> Tensor:
        """[p]: a reward before beta, of the answers' log-probabilities."""
        return logps if self.alpha == 0 else -torch.expm1(-self.alpha * logps) / self.alpha


def _sigmoid(rewards: PairTensors, s: CPO) -> Tensor:
    """CPO eq. 3, with label smoothing."""
    return label_smoothed_sigmoid_loss(s.beta * rewards.difference, s.label_smoothing)


def _simpo(rewards: PairTensors, s: CPO) -> Tensor:
    """SimPO, arXiv 2405.14734 eq. 6, with label smoothing."""
    return label_smoothed_sigmoid_loss(s.beta * rewards.difference - s.simpo_gamma, s.label_smoothing)


def _hinge(rewards: PairTensors, s: CPO) -> Tensor:
    """SLiC-HF, arXiv 2305.10425."""
    return torch.relu(1 - s.beta * rewards.difference)


def _ipo(rewards: PairTensors, s: CPO) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, without a reference."""
    return (rewards.difference - 1 / (2 * s.beta)) ** 2


LOSS_TYPES: dict[str, CpoLossType] = {
    "sigmoid": CpoLossType(_sigmoid),
    "hinge": CpoLossType(_hinge),
    "ipo": CpoLossType(_ipo, per_token=True),
    "simpo": CpoLossType(_simpo, per_token=True),
}
"""TRL's `alphapo`, which `--loss_type` takes too, is `simpo` with `cpo_alpha` 0 (and an `alpha`): a name for settings,
not a formula."""
