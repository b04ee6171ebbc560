"""Preference pairs: what the losses on a chosen and a rejected document share.

Owns the two sides of `batch.fields["pairs"]` (int64 [p, 2]: document numbers of the chosen and the rejected answer) and
the metrics that all these losses report, under TRL's names.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megaswift.losses.contract import Batch, MeanMetric, Metric, ModelOutputs, metrics_reported
from megaswift.losses.document_segments import completion_mask, completion_weights, token_mask_of_documents


@dataclass(frozen=True)
class PairTensors:
    """A number for the chosen and one for the rejected answer of each pair: [p] each."""

    chosen: Tensor
    rejected: Tensor

    @property
    def difference(self) -> Tensor:
        """[p]: chosen - rejected."""
        return self.chosen - self.rejected

    def detach(self) -> PairTensors:
        """Return the same numbers without a gradient."""
        return PairTensors(self.chosen.detach(), self.rejected.detach())

    def __add__(self, other: PairTensors) -> PairTensors:
        return PairTensors(self.chosen + other.chosen, self.rejected + other.rejected)

    def __sub__(self, other: PairTensors) -> PairTensors:
        return PairTensors(self.chosen - other.chosen, self.rejected - other.rejected)

    def __truediv__(self, other: PairTensors) -> PairTensors:
        return PairTensors(self.chosen / other.chosen, self.rejected / other.rejected)

    def __rmul__(self, factor: float) -> PairTensors:
        return PairTensors(factor * self.chosen, factor * self.rejected)


def split_pairs(batch: Batch, per_document: Tensor) -> PairTensors:
    """Split values of [documents] into those of chosen and of rejected documents."""
    pairs = batch.fields["pairs"]
    return PairTensors(per_document[pairs[:, 0]], per_document[pairs[:, 1]])


def pair_count(batch: Batch) -> int:
    """Count the pairs; a filler has none."""
    return batch.fields["pairs"].shape[0]


PAIR_COUNTS = ("pairs", "chosen_tokens")
"""The names that `pair_and_chosen_token_counts` reports."""


def pair_and_chosen_token_counts(batch: Batch) -> dict[str, float]:
    """Return `pairs` and `chosen_tokens`: the sum of the loss weights of the chosen answers' tokens."""
    chosen, _ = chosen_and_rejected(batch, completion_weights(batch))
    return {"pairs": float(pair_count(batch)), "chosen_tokens": float(chosen.sum())}


def chosen_and_rejected(batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x [b, s] (a mask or weights) into its part on chosen and its part on rejected documents; 0 elsewhere."""
    pairs = batch.fields["pairs"]
    return x * token_mask_of_documents(batch, pairs[:, 0]), x * token_mask_of_documents(batch, pairs[:, 1])


def pair_mean_metric(values: Tensor) -> MeanMetric:
    """Return the metric for the mean of values [n] over pairs or examples."""
    return MeanMetric(values.detach().sum(), values.numel())


def token_mean_metric(values: Tensor, mask: Tensor) -> MeanMetric:
    """Return the metric for the mean of values [b, s] over the tokens in `mask`."""
    return MeanMetric((values.detach() * mask).sum(), mask.sum())


IMPLICIT_REWARDS = metrics_reported(
    ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
)
"""The names that `implicit_reward_metrics` reports."""
PREFERENCE_LOGPS = metrics_reported(("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"))
"""The names that `preference_logp_metrics` reports."""


def implicit_reward_metrics(rewards: PairTensors) -> dict[str, Metric]:
    """Measure implicit rewards, how often the chosen answer's is the larger, and by how much."""
    rewards = rewards.detach()
    return {
        "rewards/chosen": pair_mean_metric(rewards.chosen),
        "rewards/rejected": pair_mean_metric(rewards.rejected),
        "rewards/accuracies": pair_mean_metric((rewards.chosen > rewards.rejected).to(rewards.chosen.dtype)),
        "rewards/margins": pair_mean_metric(rewards.difference),
    }


def preference_logp_metrics(outputs: ModelOutputs, batch: Batch, logps: PairTensors) -> dict[str, Metric]:
    """Log-probabilities of the answers, and the mean logit over their tokens and the vocabulary."""
    assert outputs.mean_logit is not None
    chosen, rejected = chosen_and_rejected(batch, completion_mask(batch))
    return {
        "logps/chosen": pair_mean_metric(logps.chosen),
        "logps/rejected": pair_mean_metric(logps.rejected),
        "logits/chosen": token_mean_metric(outputs.mean_logit, chosen),
        "logits/rejected": token_mean_metric(outputs.mean_logit, rejected),
    }
