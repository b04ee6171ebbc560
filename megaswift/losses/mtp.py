"""Multi-token prediction: the cross-entropy of layers that predict tokens further ahead (DeepSeek-V3, arXiv:2412.19437,
section 2.2).

Layer k (from 0) reads the hidden state of token t and the embedding of token t + k + 1, and predicts token t + k + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaswift.losses.contract import (
    Batch,
    Loss,
    LossTerm,
    MeanMetric,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)


@dataclass(frozen=True)
class TokensAhead:
    """The inputs and labels of one layer, [b, s] each, by the positions of the hidden states that it reads."""

    input_ids: Tensor
    """The token whose embedding the layer reads. Past the end of a document it is some token of the batch: only labels
    of weight 0 depend on it."""
    labels: Tensor
    loss_weights: Tensor
    """0 where the label would lie in another document or in padding."""
    inside: Tensor
    """bool: whether the token of `input_ids` belongs to the same document."""


def tokens_ahead(batch: Batch, layer: int) -> TokensAhead:
    """Return what layer number `layer` reads and predicts.

    Positions count from 0 within a document, so position t + n follows position t by n in the same document only.
    """
    shift = layer + 1

    def later(x: Tensor) -> Tensor:
        return x.roll(-shift, dims=1)

    inside = batch.valid & later(batch.valid) & (later(batch.positions) == batch.positions + shift)
    weights = torch.where(inside, later(batch.loss_weights), 0.0)
    return TokensAhead(later(batch.input_ids), later(batch.labels), weights, inside)


@dataclass(frozen=True)
class MultiTokenPrediction:
    """A loss, plus weight / layers x the sum over layers of each one's mean cross-entropy (equations 24 and 25).

    The reported loss is that of `loss` alone, so that it compares with runs without these layers; each layer's own
    mean is a metric under its number from 1.
    """

    loss: Loss
    layers: int
    weight: float

    @property
    def needs(self) -> RequestedModelOutputs:
        """Those of the loss, and what the layers predict."""
        return replace(self.loss.needs, ahead=self.layers)

    @property
    def reported(self) -> Reported:
        """What the loss reports, and the mean of each layer."""
        numbers = [*range(1, self.layers + 1)]
        own = Reported(
            tuple(f"mtp_{n}_weight" for n in numbers),
            {f"mtp_{n}": f"mtp_{n}_weight" for n in numbers},
            means=tuple(f"mtp_{n}_loss" for n in numbers),
            apart=tuple(f"mtp_{n}" for n in numbers),
        )
        return self.loss.reported + own

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the counts of the loss, and the sum of each layer's label weights."""
        own = {f"mtp_{n + 1}_weight": float(tokens_ahead(batch, n).loss_weights.sum()) for n in range(self.layers)}
        return {**self.loss.counts(batch), **own}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """The terms and metrics of the loss, and those of each layer."""
        terms, metrics = self.loss(outputs, batch)
        assert outputs.ahead is not None
        own: dict[str, Metric] = {}
        for n, logprobs in enumerate(outputs.ahead, 1):
            weights = tokens_ahead(batch, n - 1).loss_weights
            total = -(logprobs * weights).sum()
            terms = [*terms, LossTerm(f"mtp_{n}", total, f"mtp_{n}_weight", self.weight / self.layers)]
            own[f"mtp_{n}_loss"] = MeanMetric(total.detach(), weights.sum())
        return terms, {**metrics, **own}
