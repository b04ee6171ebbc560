"""Next-token cross-entropy over the labeled tokens: SFT and pretraining.

The loss of a global batch is sum(weight x -log p) / sum(weight): one division by the global count, so that neither the
number of ranks nor the cut into micro-batches changes it (design: one normalizer per term).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaswift.losses.contract import Batch, LossTerm, MeanMetric, Metric, ModelOutputs, Reported, RequestedModelOutputs


@dataclass(frozen=True)
class CrossEntropy:
    """Weighted token cross-entropy, with label smoothing as in transformers' LabelSmoother (arXiv:1512.00567), or with
    each token's loss times its probability: dynamic fine-tuning (arXiv:2508.05629)."""

    label_smoothing: float = 0.0
    """The share of the target distribution that is spread evenly over the vocabulary."""
    times_probability: bool = False
    """Multiply the loss of a token by its probability, through which no gradient flows."""

    @property
    def needs(self) -> RequestedModelOutputs:
        """Fields of the model's output."""
        smoothed = {"logsumexp", "mean_logit"} if self.label_smoothing else set()
        return RequestedModelOutputs(fields=frozenset({"logprobs", "correct", *smoothed}))

    @property
    def reported(self) -> Reported:
        """The loss, and the accuracy."""
        return Reported(("label_weight",), {"loss": "label_weight"}, means=("token_accuracy",))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return `label_weight`: the sum of the loss weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term, and the share of labels that are the model's first choice."""
        assert outputs.logprobs is not None and outputs.correct is not None
        losses = -outputs.logprobs  # [b, s]
        if self.label_smoothing:
            assert outputs.logsumexp is not None and outputs.mean_logit is not None
            uniform = outputs.logsumexp - outputs.mean_logit  # mean over the vocabulary of -log p
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform
        if self.times_probability:
            losses = losses * outputs.logprobs.detach().exp()
        total = (losses * batch.loss_weights).sum()
        labeled = batch.loss_weights != 0
        accuracy = MeanMetric((outputs.correct * labeled).sum(), labeled.sum())
        return [LossTerm("loss", total, "label_weight")], {"token_accuracy": accuracy}
