"""The loss of PPO's critic: predicted return at each token of a completion.

Owns the clipped value loss over `batch.fields["returns"]` and, [b, s] too, `["values"]`, the critic's values before the
update. The value at a label's position is that of the text before the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.preference_pairs import token_mean_metric

PARTS = ("value/returns", "value/returns_squared", "value/error", "value/error_squared")


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error, or that of a value held near the one before the update where it is larger (arXiv
    2005.12729, section 3)."""

    cliprange_value: float | None = 0.2
    """How far a value may move from the one before the update; None: any way."""
    vf_coef: float = 1.0
    """Weight of the term; it only matters where the trunk is the policy's too."""
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head="score")

    @property
    def reported(self) -> Reported:
        """The loss, what was clipped, and the parts of `explained_variance`."""
        means = ("vf_loss", "vf_clip_ratio", "value/mean", *PARTS)
        return Reported(("completion_tokens",), {"loss/value": "completion_tokens"}, means)

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of `completion_tokens`."""
        return {"completion_tokens": float(batch.label_tokens)}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term; the loss, what was clipped, and the parts of `explained_variance`."""
        assert outputs.values is not None
        values = outputs.values
        mask = batch.loss_weights != 0
        returns = batch.fields["returns"].to(values.dtype)
        squares = (values - returns) ** 2
        clipped = torch.zeros_like(mask)
        if self.cliprange_value is not None:
            before = batch.fields["values"].to(values.dtype)
            clipped_error = (
                before + (values - before).clamp(-self.cliprange_value, self.cliprange_value) - returns
            ) ** 2
            clipped = clipped_error > squares
            squares = torch.maximum(squares, clipped_error)
        error = (returns - values).detach()
        parts = (returns, returns**2, error, error**2)
        metrics: dict[str, Metric] = {
            "vf_loss": token_mean_metric(squares / 2, mask),
            "vf_clip_ratio": token_mean_metric(clipped.to(values.dtype), mask),
            "value/mean": token_mean_metric(values, mask),
            **{name: token_mean_metric(x, mask) for name, x in zip(PARTS, parts, strict=True)},
        }
        return [LossTerm("loss/value", (squares * mask).sum() / 2, "completion_tokens", self.vf_coef)], metrics


def explained_variance(metrics: Mapping[str, float]) -> float | None:
    """Return 1 - variance of the critic's errors / variance of returns, from reduced metrics; None where returns do not
    vary."""
    if not all(name in metrics for name in PARTS):
        return None
    returns, squared, error, error_squared = (metrics[name] for name in PARTS)
    spread = squared - returns**2
    return 1 - (error_squared - error**2) / spread if spread > 1e-12 else None
