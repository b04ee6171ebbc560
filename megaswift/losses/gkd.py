"""Distillation from a teacher: the generalized Jensen-Shannon divergence over the vocabulary (arXiv 2306.13649), with a
cross-entropy on answers of others where it has a weight.

The engine computes the divergence at each label (`losses.contract.Divergence`). The loss of a global batch is
sum(weight x divergence) / sum(weight), TRL's reduction batchmean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megaswift.losses.contract import (
    Batch,
    Divergence,
    LossTerm,
    MeanMetric,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)


@dataclass(frozen=True)
class Distillation:
    """The weighted mean of the divergence over label tokens.

    `fields["sampled"]` bool []: the model itself wrote the answers of this micro-batch, so there is nothing to imitate.
    """

    beta: float = 0.5
    """0: KL from the teacher's distribution; 1: KL from the student's; between them: the divergence from a mixture."""
    temperature: float = 1.0
    topk: int | None = None
    """Over the teacher's largest so many probabilities; None: the whole vocabulary."""
    sft_alpha: float = 0.0
    """Weight of the cross-entropy on answers that the model has not written itself."""

    @property
    def needs(self) -> RequestedModelOutputs:
        """The divergence; log-probabilities, of which only the cross-entropy is differentiated."""
        reported = frozenset({"correct"} if self.sft_alpha else {"correct", "logprobs"})
        return RequestedModelOutputs(
            fields=frozenset({"logprobs", "correct"}),
            without_gradient=reported,
            divergence=Divergence(self.beta, self.temperature, self.topk),
        )

    @property
    def reported(self) -> Reported:
        """The terms of the loss and the accuracy."""
        terms = {"loss/divergence": "label_weight"}
        if self.sft_alpha:
            terms["loss/sft"] = "label_weight"
        return Reported(("label_weight",), terms, means=("token_accuracy", "cross_entropy"))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `label_weight`: the sum of the loss weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The divergence, the cross-entropy where it has a weight, and metrics of the labels."""
        assert outputs.divergence is not None and outputs.logprobs is not None and outputs.correct is not None
        weights = batch.loss_weights
        terms = [LossTerm("loss/divergence", (outputs.divergence * weights).sum(), "label_weight")]
        cross_entropy = -(outputs.logprobs * weights).sum()
        if self.sft_alpha:
            imitated = cross_entropy
            if "sampled" in batch.fields:
                imitated = torch.where(batch.fields["sampled"], torch.zeros_like(cross_entropy), cross_entropy)
            terms.append(LossTerm("loss/sft", imitated, "label_weight", self.sft_alpha))
        labeled = weights != 0
        metrics: dict[str, Metric] = {
            "token_accuracy": MeanMetric((outputs.correct * labeled).sum(), labeled.sum()),
            "cross_entropy": MeanMetric(cross_entropy.detach(), weights.sum()),
        }
        return terms, metrics
