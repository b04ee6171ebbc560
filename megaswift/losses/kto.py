"""KTO and BCO: losses on single completions labeled desirable or undesirable.

Owns the losses over `batch.fields["examples"]` (int64 [n], document numbers; fillers left out) and `fields["label"]`
(bool [documents]). KTO's z0 comes in `fields["kl"]`, BCO's running mean in `fields["delta"]`: both are estimates over
more than a micro-batch, so the trainer makes them beforehand, from `log_ratios`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import (
    Batch,
    LossTerm,
    MeanMetric,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)
from megaswift.losses.document_segments import (
    completion_mask,
    completion_weights,
    document_sums,
    token_mask_of_documents,
)
from megaswift.losses.options.loss_table import KL_PAIRS, RUNNING_MEAN, losses_needing
from megaswift.losses.preference_pairs import token_mean_metric


def log_ratios(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return [n]: log-probability of each example's answer under the policy less that under the reference.

    Their mean over mismatched answers, averaged over data-parallel ranks and not below 0, is KTO's z0.
    """
    difference = (logprobs - batch.fields["reference"].to(logprobs.dtype)) * completion_weights(batch)
    return document_sums(batch, difference)[batch.fields["examples"]]


def _kto(rewards: Tensor, good: Tensor, zero: Tensor) -> Tensor:
    """KTO, arXiv 2402.01306 eq. 7; `zero`: beta x z0."""
    return torch.sigmoid(_signed(zero - rewards, good))


def _apo_zero_unpaired(rewards: Tensor, good: Tensor, _: Tensor) -> Tensor:
    """APO-zero, arXiv 2408.06266 eq. 7, without pairs."""
    return torch.sigmoid(_signed(-rewards, good))


def _bco(rewards: Tensor, good: Tensor, zero: Tensor) -> Tensor:
    """BCO, arXiv 2404.04656 eq. 9: a classifier of good answers; `zero`: the running mean of rewards."""
    return -F.logsigmoid(_signed(rewards - zero, good))


def _signed(x: Tensor, good: Tensor) -> Tensor:
    return torch.where(good, x, -x)


LOSS_TYPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kto": _kto,
    "apo_zero_unpaired": _apo_zero_unpaired,
    "bco": _bco,
}
"""(rewards [n], desirable [n], where a reward counts as 0) -> [n]."""


def uses_kl(loss_type: str) -> bool:
    """Return whether a type needs z0, and so a pass over mismatched answers."""
    return loss_type in losses_needing("kto", KL_PAIRS)


def uses_delta(loss_type: str) -> bool:
    """Return whether a type needs the running mean of rewards."""
    return loss_type in losses_needing("kto", RUNNING_MEAN)


@dataclass(frozen=True)
class KTO:
    """Kahneman-Tversky optimization. The reference's log-probabilities come in `batch.fields["reference"]`, [b, s]."""

    loss_type: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    needs: RequestedModelOutputs = RequestedModelOutputs(
        fields=frozenset({"logprobs", "entropy", "mean_logit"}), without_gradient=frozenset({"entropy", "mean_logit"})
    )

    def __post_init__(self) -> None:
        assert self.loss_type in LOSS_TYPES, f"unknown loss type {self.loss_type}"

    @property
    def reported(self) -> Reported:
        """The loss, and TRL's metrics."""
        sides = tuple(f"{kind}/{side}" for kind in ("rewards", "logps", "logits") for side in ("chosen", "rejected"))
        zero = tuple(name for name, used in (("kl", uses_kl), ("delta", uses_delta)) if used(self.loss_type))
        margins = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}
        return Reported(("examples",), {"loss": "examples"}, ("entropy", *sides, *zero), differences=margins)

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of `examples`."""
        return {"examples": float(batch.fields["examples"].numel())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term, and TRL's metrics."""
        assert outputs.logprobs is not None
        examples = batch.fields["examples"]
        good = batch.fields["label"][examples]
        rewards = self.beta * log_ratios(outputs.logprobs, batch)
        zero = self._zero(batch, rewards)
        weight = torch.where(good, self.desirable_weight, self.undesirable_weight)
        total = (LOSS_TYPES[self.loss_type](rewards, good, zero) * weight).sum()
        answers = document_sums(batch, outputs.logprobs * completion_weights(batch))[examples]
        return [LossTerm("loss", total, "examples")], self._metrics(outputs, batch, rewards, answers)

    def _zero(self, batch: Batch, rewards: Tensor) -> Tensor:
        """0-d: the reward that counts as neither good nor bad."""
        if uses_kl(self.loss_type):
            return self.beta * batch.fields["kl"].to(rewards.dtype).reshape(())
        return (
            batch.fields["delta"].to(rewards.dtype).reshape(()) if uses_delta(self.loss_type) else rewards.new_zeros(())
        )

    def _metrics(self, outputs: ModelOutputs, batch: Batch, rewards: Tensor, answers: Tensor) -> dict[str, Metric]:
        assert outputs.entropy is not None and outputs.mean_logit is not None
        examples = batch.fields["examples"]
        mask = completion_mask(batch)
        good = batch.fields["label"][examples]
        metrics: dict[str, Metric] = {"entropy": token_mean_metric(outputs.entropy, mask)}
        for side, of in (("chosen", good), ("rejected", ~good)):
            metrics[f"rewards/{side}"] = MeanMetric(torch.where(of, rewards.detach(), 0).sum(), of.sum())
            metrics[f"logps/{side}"] = MeanMetric(torch.where(of, answers.detach(), 0).sum(), of.sum())
            metrics[f"logits/{side}"] = token_mean_metric(
                outputs.mean_logit, mask & token_mask_of_documents(batch, examples, of)
            )
        for name, used in (("kl", uses_kl), ("delta", uses_delta)):
            if used(self.loss_type):
                metrics[name] = MeanMetric(batch.fields[name].sum() * examples.numel(), examples.numel())
        return metrics
