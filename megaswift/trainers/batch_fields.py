"""Inputs of preference losses computed before a step: reference log-probabilities, KTO's and BCO's reference points.

Owns when the reference runs and what is added to a batch's `fields`. The formulas are in `megaswift.losses`, the
reference's weights are the engine's. As hooks they move the reference (TR-DPO) and keep what must outlive a restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megaswift.engine.objective import all_sum_on_device
from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Batch, RequestedModelOutputs
from megaswift.losses.kto import log_ratios
from megaswift.losses.retrieval.groups import POOLING
from megaswift.losses.reward import weight_last_tokens_only
from megaswift.trainers.hook import Hook, Run, StepRecord
from megaswift.trainers.reference_logprobs import PrecomputedReferenceLogprobs

Mismatched = Callable[[Sequence[Batch], bool], list[Batch]]
"""(micro-batches of examples, whether completions are taken from the whole global batch) -> those with other
completions."""


def batch_logprobs(engine: Engine, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Log-probabilities [b, s] of each micro-batch under the weights that the engine has."""
    scored = [outputs.logprobs for outputs in engine.score(batches, RequestedModelOutputs())]
    return [logprobs for logprobs in scored if logprobs is not None]


def with_field(batches: Sequence[Batch], name: str, values: Sequence[torch.Tensor]) -> list[Batch]:
    """Return the micro-batches with one more field."""
    return [replace(b, fields={**b.fields, name: v}) for b, v in zip(batches, values, strict=True)]


class BatchTransform(Hook, ABC):
    """Adds to micro-batches what a loss reads."""

    @abstractmethod
    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Add to the micro-batches of one step what the loss reads; `training` False in evaluation, which changes no
        state."""


class ReferenceLogprobs(BatchTransform):
    """Adds `fields["reference"]`."""

    def __init__(self, move_every: int | None = None, share: float = 0.0) -> None:
        self.move_every = move_every
        self.share = share
        self.known: Mapping[bool, PrecomputedReferenceLogprobs] = {}
        """Numbers scored before training, by whether they are of the data to train on; empty where the engine is
        asked."""

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Add the reference's log-probabilities to the micro-batches."""
        if self.known:
            return with_field(batches, "reference", [self.known[training].of(b) for b in batches])
        with engine.reference():
            return with_field(batches, "reference", batch_logprobs(engine, batches))

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Moves the reference towards the model."""
        if self.move_every and step.number % self.move_every == 0:
            run.engine.move_reference(self.share)


class KtoBaseline(ReferenceLogprobs):
    """Adds KTO's `fields["kl"]` too: the mean log-ratio of mismatched answers, not below 0 (arXiv:2402.01306, section
    4).

    One number for each micro-batch index, averaged over data-parallel ranks, as in TRL; of micro-batches of one row,
    one number for the global batch, whose order and mean no layout changes.
    """

    def __init__(
        self,
        mismatched: Mismatched,
        over_global_batch: Callable[[bool], bool],
        move_every: int | None = None,
        share: float = 0.0,
    ) -> None:
        super().__init__(move_every, share)
        self.mismatched = mismatched
        self.over_global_batch = over_global_batch

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Add both fields to the micro-batches."""
        whole = self.over_global_batch(training)
        others = self.mismatched(batches, whole)
        with engine.reference():
            own = batch_logprobs(engine, batches)
            rest = with_field(others, "reference", batch_logprobs(engine, others))
        policy = batch_logprobs(engine, rest)
        totals = _sums_and_counts(policy, rest)
        if whole:
            totals = totals.sum(0, keepdim=True).expand(len(batches), 2)
        zeros = (totals[:, 0] / totals[:, 1].clamp(min=1)).clamp(min=0).float()
        return with_field(with_field(batches, "reference", own), "kl", zeros.unbind())


class BcoReferencePoint(ReferenceLogprobs):
    """Adds BCO's `fields["delta"]` too: the mean reward of all examples so far, this step's included (arXiv:2404.04656,
    section 4.1)."""

    def __init__(self, beta: float, move_every: int | None = None, share: float = 0.0) -> None:
        super().__init__(move_every, share)
        self.beta = beta
        self.sum: torch.Tensor | float = 0.0
        self.count: torch.Tensor | float = 0.0
        """On the device, [] in float64, once they have grown."""

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Add both fields to the micro-batches; evaluation leaves the mean as it is."""
        prepared = super().prepare(engine, batches, training)
        if training:
            total, count = _sums_and_counts(batch_logprobs(engine, prepared), prepared).sum(0).unbind()
            self.sum = self.sum + self.beta * total
            self.count = self.count + count
        delta = torch.as_tensor(self.sum).float() / torch.as_tensor(self.count).float().clamp(min=1)
        return with_field(prepared, "delta", [delta] * len(prepared))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of which the mean is made."""
        return {"sum": float(self.sum), "count": float(self.count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums that `state_dict` returned."""
        self.sum = float(state["sum"])
        self.count = float(state["count"])


def _sums_and_counts(policy: Sequence[torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
    """float64 [micro-batches, 2]: of each one's log-ratios the sum and the number, over all ranks, on the device: the
    host does not wait. Replicas of a model-parallel grid count alike, in sum and number. Collective."""
    ratios = [log_ratios(p, b.to(p.device)).double() for p, b in zip(policy, batches, strict=True)]
    sums = torch.stack([torch.stack([r.sum(), torch.full_like(r.sum(), r.numel())]) for r in ratios])
    return all_sum_on_device(sums)


class PooledTokens(BatchTransform):
    """For embedding models and rerankers: the tokens of which a text's vector, or its score, is made."""

    def __init__(self, pooling: str) -> None:
        self.pooling = POOLING[pooling]

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Mark those positions in the micro-batches, by their weights."""
        return [self.pooling(b) for b in batches]


class LastTokens(BatchTransform):
    """For reward models: the head looks at the last token of each conversation, and nowhere else."""

    def prepare(self, engine: Engine, batches: list[Batch], training: bool) -> list[Batch]:
        """Mark those positions in the micro-batches."""
        return [weight_last_tokens_only(b) for b in batches]
