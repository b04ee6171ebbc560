"""ORPO (arXiv 2403.07691): NLL of the chosen documents and odds ratio of chosen and rejected completions, without a
reference model.

Owns both terms. The likelihood covers the prompt too, as in TRL: `loss_weights` marks every label,
`fields["completion"]` those of the answers. Without that field the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import Batch, Metric, ModelOutputs, RequestedModelOutputs, Term
from megaswift.losses.document_segments import completion_mask, document_counts, document_sums
from megaswift.losses.preference_pairs import (
    PairTensors,
    implicit_reward_metrics,
    pair_count,
    pair_mean,
    preference_logp_metrics,
    side_masks,
    split_pairs,
    token_mean,
)


@dataclass(frozen=True)
class ORPO:
    """Odds ratio preference optimization."""

    beta: float = 0.1
    """Weight of the odds ratio: lambda of the paper."""
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset({"logprobs", "mean_logit"}))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """`pairs`, and `chosen_tokens`: labels of chosen documents, prompts included."""
        return {"pairs": float(pair_count(batch)), "chosen_tokens": float(_chosen(batch).sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[Term], Mapping[str, Metric]]:
        """The likelihood, the odds ratio, and TRL's metrics."""
        assert outputs.logprobs is not None
        mask = completion_mask(batch)
        logps = split_pairs(batch, document_sums(batch, outputs.logprobs * mask)) / split_pairs(
            batch, document_counts(batch, mask).clamp(min=1)
        )
        log_odds = (logps - PairTensors(_log1mexp(logps.chosen), _log1mexp(logps.rejected))).difference
        ratio = F.logsigmoid(log_odds)
        chosen = _chosen(batch)
        terms = [
            Term("loss/sft", -(outputs.logprobs * chosen).sum(), "chosen_tokens"),
            Term("loss/odds_ratio", -ratio.sum(), "pairs", self.beta),
        ]
        metrics: dict[str, Metric] = {
            **implicit_reward_metrics(self.beta * logps),
            **preference_logp_metrics(outputs, batch, logps),
            "nll_loss": token_mean(-outputs.logprobs, chosen),
            "log_odds_ratio": pair_mean(ratio),
            "log_odds_chosen": pair_mean(log_odds),
        }
        return terms, metrics


def _chosen(batch: Batch) -> Tensor:
    """bool [b, s]: labels of chosen documents."""
    return side_masks(batch, batch.loss_weights != 0)[0]


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0, where 1 - exp(x) cancels; where a probability rounds to 1, as for the
    next smaller one."""
    return torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps)))
