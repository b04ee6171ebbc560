"""The reward model's loss: Bradley-Terry on scalar scores of whole documents.

Owns the loss, its metrics and where a document's score is read: at its last token, as `...ForSequenceClassification`
models do. That is the one position that `weight_last_tokens_only` marks, and so the only one at which the head works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import (
    Batch,
    LossTerm,
    MaxMetric,
    MeanMetric,
    Metric,
    MinMetric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)
from megaswift.losses.document_segments import document_index, document_sums
from megaswift.losses.preference_pairs import PairTensors, pair_count, pair_mean_metric, split_pairs


def weight_last_tokens_only(batch: Batch) -> Batch:
    """Return the batch with a weight of 1 at the last token of each document and none elsewhere; fillers and shared
    prefixes have none."""
    documents = document_index(batch).flatten()
    valid = batch.valid.flatten()
    if batch.prefixes is not None:
        valid = valid & ~torch.isin(documents, batch.prefixes)
    goes_on = torch.zeros_like(valid)
    goes_on[:-1] = valid[1:] & (documents[1:] == documents[:-1])
    return replace(batch, loss_weights=(valid & ~goes_on).view_as(batch.valid).to(batch.loss_weights.dtype))


def _bradley_terry(scores: PairTensors, margin: Tensor) -> Tensor:
    """-log sigmoid(score of the chosen - score of the rejected - margin)."""
    return -F.logsigmoid(scores.difference - margin)


LOSS_TYPES: dict[str, Callable[[PairTensors, Tensor], Tensor]] = {"bradley_terry": _bradley_terry}
"""(scores of the two answers, [p] each; margin [p]) -> [p]."""


@dataclass(frozen=True)
class RewardLoss:
    """A loss on the scores of pairs, and centring where it has a weight."""

    center_rewards_coefficient: float | None = None
    """Weight of the squared sum of a pair's scores (arXiv 2312.09244)."""
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head="score")
    loss_type: str = "bradley_terry"

    @property
    def reported(self) -> Reported:
        """The preference, centring where it has a weight, and TRL's metrics."""
        terms = {"loss/preference": "pairs"}
        if self.center_rewards_coefficient is not None:
            terms["loss/centring"] = "pairs"
        means = ("accuracy", "margin", "mean_reward")
        return Reported(("pairs",), terms, means, largest=("max_reward",), smallest=("min_reward",))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of `pairs`."""
        return {"pairs": float(pair_count(batch))}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The preference, centring, and TRL's metrics."""
        assert outputs.values is not None
        scores = split_pairs(batch, document_sums(batch, outputs.values * (batch.loss_weights != 0)))
        zeros = torch.zeros_like(scores.chosen)
        margin = batch.fields["margin"].to(zeros.dtype) if "margin" in batch.fields else zeros
        terms = [LossTerm("loss/preference", LOSS_TYPES[self.loss_type](scores, margin).sum(), "pairs")]
        if self.center_rewards_coefficient is not None:
            squares = ((scores.chosen + scores.rejected) ** 2).sum()
            terms.append(LossTerm("loss/centring", squares, "pairs", self.center_rewards_coefficient))
        return terms, self._metrics(scores.detach().chosen, scores.detach().rejected)

    def _metrics(self, chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            "accuracy": pair_mean_metric((chosen > rejected).to(chosen.dtype)),
            "margin": pair_mean_metric(chosen - rejected),
            "mean_reward": MeanMetric(chosen.sum() + rejected.sum(), 2 * chosen.numel()),
            "min_reward": MinMetric(float("inf")),
            "max_reward": MaxMetric(-float("inf")),
        }
        if chosen.numel():
            metrics["min_reward"] = MinMetric(chosen.minimum(rejected).min())
            metrics["max_reward"] = MaxMetric(chosen.maximum(rejected).max())
        return metrics
