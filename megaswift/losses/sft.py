"""Next-token cross-entropy over the labeled tokens: SFT and pretraining.

The loss of a global batch is sum(weight x -log p) / sum(weight): one division by the global count, so that neither the
number of ranks nor the cut into micro-batches changes it (design: one normalizer per term).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaswift.losses.contract import Batch, LossTerm, MeanMetric, Metric, ModelOutputs, RequestedModelOutputs


@dataclass(frozen=True)
class CrossEntropy:
    """Weighted token cross-entropy."""

    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset({"logprobs", "correct"}))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """`label_weight`: the sum of the loss weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term, and the share of labels that are the model's first choice."""
        assert outputs.logprobs is not None
        total = -(outputs.logprobs * batch.loss_weights).sum()
        labeled = batch.loss_weights != 0
        metrics: dict[str, Metric] = {}
        if outputs.correct is not None:
            metrics["token_accuracy"] = MeanMetric((outputs.correct * labeled).sum(), labeled.sum())
        return [LossTerm("loss", total, "label_weight")], metrics
