"""ORPO (arXiv 2403.07691): NLL of the chosen documents and odds ratio of chosen and rejected completions, without a
reference model.

Owns both terms, of which `LOSS_TYPES` holds the second. The likelihood covers the prompt too, as in TRL:
`loss_weights` marks every label, `fields["completion"]` those of the answers. Without that field the two are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.document_segments import completion_weight_per_document, completion_weights, document_sums
from megaswift.losses.preference_pairs import (
    IMPLICIT_REWARDS,
    PAIR_COUNTS,
    PREFERENCE_LOGPS,
    PairTensors,
    chosen_and_rejected,
    implicit_reward_metrics,
    pair_count,
    pair_mean_metric,
    preference_logp_metrics,
    split_pairs,
    token_mean_metric,
)


@dataclass(frozen=True)
class ORPO:
    """Odds ratio preference optimization."""

    beta: float = 0.1
    """Weight of the odds ratio: lambda of the paper."""
    loss_type: str = "odds_ratio"
    needs: RequestedModelOutputs = RequestedModelOutputs(
        fields=frozenset({"logprobs", "mean_logit"}), without_gradient=frozenset({"mean_logit"})
    )

    @property
    def reported(self) -> Reported:
        """The two terms, and TRL's metrics."""
        terms = {"loss/sft": "chosen_tokens", f"loss/{self.loss_type}": "pairs"}
        own = Reported(PAIR_COUNTS, terms, means=("nll_loss", "log_odds_ratio", "log_odds_chosen"))
        return own + IMPLICIT_REWARDS + PREFERENCE_LOGPS

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `pairs` and `chosen_tokens`: labels of chosen documents, prompts included."""
        return {"pairs": float(pair_count(batch)), "chosen_tokens": float(_chosen(batch).sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The likelihood, the odds ratio, and TRL's metrics."""
        assert outputs.logprobs is not None
        logps = split_pairs(batch, document_sums(batch, outputs.logprobs * completion_weights(batch))) / split_pairs(
            batch, completion_weight_per_document(batch)
        )
        log_odds = _log_odds(logps)
        chosen = _chosen(batch)
        preference = LOSS_TYPES[self.loss_type](logps)
        terms = [
            LossTerm("loss/sft", -(outputs.logprobs * chosen).sum(), "chosen_tokens"),
            LossTerm(f"loss/{self.loss_type}", preference.sum(), "pairs", self.beta),
        ]
        metrics: dict[str, Metric] = {
            **implicit_reward_metrics(self.beta * logps),
            **preference_logp_metrics(outputs, batch, logps),
            "nll_loss": token_mean_metric(-outputs.logprobs, chosen),
            "log_odds_ratio": pair_mean_metric(F.logsigmoid(log_odds)),
            "log_odds_chosen": pair_mean_metric(log_odds),
        }
        return terms, metrics


def _chosen(batch: Batch) -> Tensor:
    """float32 [b, s]: loss weights of chosen documents."""
    return chosen_and_rejected(batch, batch.loss_weights)[0]


def _log_odds(logps: PairTensors) -> Tensor:
    """[p]: the log of the odds ratio of chosen and rejected answers."""
    return (logps - PairTensors(_log1mexp(logps.chosen), _log1mexp(logps.rejected))).difference


def _odds_ratio(logps: PairTensors) -> Tensor:
    """Eq. 7."""
    return -F.logsigmoid(_log_odds(logps))


LOSS_TYPES: dict[str, Callable[[PairTensors], Tensor]] = {"odds_ratio": _odds_ratio}
"""(log-probabilities of the two answers, means over their tokens, [p] each) -> [p]."""


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0, where 1 - exp(x) cancels; where a probability rounds to 1, as for the
    next smaller one."""
    return torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps)))
