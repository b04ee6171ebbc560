"""The interface of losses: the batch, the requested model outputs, and the returned terms and metrics.

Owns the seam between data, losses and engines. Losses know neither logits nor process groups: the engine computes the
requested fields (vocab-parallel, chunked), joins context-parallel shards, and divides each term once by the global
count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megaswift.device_copy import copy_to_device_async

SCORES = "score"
HIDDEN = "hidden"
TOKENS = "tokens"
FIELDS = ("logprobs", "entropy", "logsumexp", "correct", "mean_logit", "log_sum_sq")


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one data-parallel rank, whole sequences (the engine makes the context-parallel slices).

    Shapes: `[b, s]` for every tensor but `cu_seqlens` and `prefixes`. A packed batch has b = 1 and `cu_seqlens`.
    """

    input_ids: Tensor
    """int64 [b, s]."""
    labels: Tensor
    """int64 [b, s], already shifted: labels[b, t] follows token t. Any valid id where the weight is 0."""
    loss_weights: Tensor
    """float32 [b, s]: weight of the label at t; 0 where there is none."""
    positions: Tensor
    """int64 [b, s]: position within the document, from 0; after a shared prefix, from its length."""
    valid: Tensor
    """bool [b, s]: False on padding (routers leave these tokens out of their losses)."""
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1], starts of the padded documents in a packed row and its end; None when not packed."""
    sample_ids: Tensor | None = None
    """int64 [rows or documents]: which samples of the data set these are."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """What the algorithm needs besides: pair indices, advantages, old and reference log-probabilities."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Inputs of towers (images)."""
    prefixes: Tensor | None = None
    """int64 [documents]: the number of the document that holds the first tokens of this one, to which it attends as to
    its own; -1: none. None where no document has such a prefix."""
    ahead: object = None
    """What an engine has computed of this batch beforehand (`Engine.prepare_ahead`), for itself."""

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to `device`."""
        return self.with_tensors(lambda tensor: copy_to_device_async(tensor, device))

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `function` applied to each of its tensors, without anything that was computed ahead."""

        def move(v: Any) -> Any:
            if isinstance(v, Tensor):
                return function(v)
            return {k: move(x) for k, x in v.items()} if isinstance(v, Mapping) else v

        return replace(
            self, **{k: move(getattr(self, k)) for k in self.__dataclass_fields__ if k != "ahead"}, ahead=None
        )

    @property
    def tokens(self) -> int:
        """Non-padding tokens."""
        return int(self.valid.sum())

    @property
    def label_tokens(self) -> int:
        """Tokens with a label of non-zero weight."""
        return int((self.loss_weights != 0).sum())


class ModelShape(Protocol):
    """The part of a model's description that says how wide its outputs are."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    @property
    def labels(self) -> int:
        """Numbers that a classifier's head gives for a position."""


@dataclass(frozen=True)
class Divergence:
    """The divergence from a teacher that a loss asks of the model, at each label position.

    The generalized Jensen-Shannon divergence of arXiv 2306.13649, equation 1, as TRL's GKDTrainer has it: with p the
    teacher's distribution, q the model's and m = beta p + (1 - beta) q, beta KL(p | m) + (1 - beta) KL(q | m);
    KL(p | q) for beta 0 and KL(q | p) for beta 1.
    """

    beta: float = 0.5
    temperature: float = 1.0
    """By which the logits of both are divided."""
    topk: int | None = None
    """Over the teacher's largest so many probabilities alone, as with `teacher_logprobs`; None: the vocabulary."""


@dataclass(frozen=True)
class RequestedModelOutputs:
    """What a task asks of the model for each label position."""

    fields: frozenset[str] = frozenset({"logprobs"})
    without_gradient: frozenset[str] = frozenset()
    """The `fields` that the objective does not differentiate (metrics, weights). The engine leaves them out of
    the backward pass. `correct` has no gradient in any case."""
    temperature: float = 1.0
    head: str | None = None
    """`score`: `ModelOutputs.vectors` by a classifier's head in place of the vocabulary's; `hidden`: the last hidden
    states themselves; `tokens`: the logits of `tokens` alone. `fields` is empty then."""
    tokens: tuple[int, ...] = ()
    """Ids of the vocabulary, for the head `tokens`."""
    ahead: int = 0
    """Layers for multi-token prediction whose log-probabilities are asked for too, at temperature 1."""
    divergence: Divergence | None = None
    """`ModelOutputs.divergence` too, besides the `fields`. The batch has the teacher's last hidden states in
    `fields["teacher_hidden"]`, [b, s, hidden size of the teacher], whose head the engine was given
    (`Engine.set_teacher_head`); or its largest log-probabilities at the divergence's temperature and their tokens in
    `fields["teacher_logprobs"]` and `fields["teacher_ids"]`, [b, s, k]: all other tokens then are one further outcome
    of both distributions. Ranks before the last pipeline stage need none of these fields."""

    def __post_init__(self) -> None:
        unknown = set(self.fields) - set(FIELDS)
        assert not unknown, f"unknown output fields {sorted(unknown)}"
        assert self.without_gradient <= self.fields, f"not among the fields: {sorted(self.without_gradient)}"
        assert bool(self.fields) == (self.head is None), "either vocabulary fields or a separate head"
        assert bool(self.tokens) == (self.head == TOKENS), "tokens are for the head of this name"

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs in order, without those of a separate head."""
        return tuple(f for f in FIELDS if f in self.fields)

    def rows(self, spec: ModelShape) -> int:
        """Return how many numbers the engine computes for each position: those of the head, or the outputs, then those
        of the layers ahead, then the divergence."""
        if self.head == TOKENS:
            return len(self.tokens)
        if self.head:
            return spec.hidden_size if self.head == HIDDEN else spec.labels
        return len(self.names) + self.ahead + (self.divergence is not None)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Those of `names` through which gradients flow, in order."""
        return tuple(name for name in self.names if name != "correct" and name not in self.without_gradient)


def gather_from_one_rank(x: Tensor) -> Tensor:
    """Return x [...] as [1, ...]: what `ModelOutputs.gather` makes of it where there is one data-parallel rank."""
    return x.unsqueeze(0)


@dataclass(frozen=True)
class ModelOutputs:
    """What the engine computed, float32 `[b, s]` each, zero where the label's weight is 0. None where not asked for."""

    logprobs: Tensor | None = None
    """log p(labels[b, t] | tokens up to t) at the needed temperature; differentiable in training."""
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    correct: Tensor | None = None
    """1 where the label is the arg max; never differentiable."""
    mean_logit: Tensor | None = None
    log_sum_sq: Tensor | None = None
    """log of the sum over the vocabulary of p^2."""
    values: Tensor | None = None
    """The values of a head with one label; differentiable in training."""
    vectors: Tensor | None = None
    """[b, s, labels], [b, s, hidden size] or [b, s, tokens]: what a head of classes gives, hidden states, or logits;
    differentiable in training."""
    divergence: Tensor | None = None
    """The divergence from the teacher at each label position; differentiable in training."""
    ahead: Tensor | None = None
    """[layers, b, s]: for each layer for multi-token prediction the log-probability of its label
    (`losses.mtp.tokens_ahead`); differentiable in training."""
    gather: Callable[[Tensor], Tensor] = gather_from_one_rank
    """Tensors of one shape from the same micro-batch of all data-parallel ranks: x [...] to [ranks, ...]. The gradient
    of x is the sum of what all ranks' losses contribute, so that terms over a rank's own rows add up to the exact
    gradient. Collective: a loss calls it for each micro-batch, whatever that holds."""
    rank: int = 0
    """This rank's place in what `gather` returns."""


@dataclass(frozen=True)
class LossTerm:
    """A part of the objective: weight x sum / global count of `denominator`."""

    name: str
    sum: Tensor
    """Differentiable scalar, summed over this micro-batch, not divided by anything."""
    denominator: str
    """A key of `Loss.counts`."""
    weight: float = 1.0


@dataclass(frozen=True)
class MeanMetric:
    """A metric reduced as sum of sums over sum of counts; not reported where nothing was counted."""

    sum: Tensor | float
    count: Tensor | float


@dataclass(frozen=True)
class SumMetric:
    """A metric that adds up over micro-batches and data-parallel ranks."""

    value: Tensor | float


@dataclass(frozen=True)
class MaxMetric:
    """A metric of which the largest counts."""

    value: Tensor | float


@dataclass(frozen=True)
class MinMetric:
    """A metric of which the smallest counts."""

    value: Tensor | float


@dataclass(frozen=True)
class VectorMetric:
    """Numbers that add up, from which metrics are made once a whole evaluation is added up (`Addable`)."""

    value: Tensor
    """[n]."""


Metric = MeanMetric | SumMetric | MaxMetric | MinMetric | VectorMetric


@dataclass(frozen=True)
class Addable:
    """Metrics that are neither sums nor means, such as F1: they are made of numbers that add up over batches. Only
    evaluations report them, each once for all of its rows."""

    size: int
    """How many numbers there are."""
    metrics: Callable[[Sequence[float]], Mapping[str, float]]
    """Makes metrics by name of the sums."""


@dataclass(frozen=True)
class Reported:
    """The names of all that a loss reports of each micro-batch. They are fixed when the loss is built, so that ranks
    and pipeline stages exchange numbers alone."""

    counts: tuple[str, ...]
    """Those of `Loss.counts`."""
    terms: Mapping[str, str]
    """Each term of the objective with the count that divides it."""
    means: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    smallest: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics that are the first of two means less the second, taken once both are reduced; not reported where one of
    them counted nothing."""
    apart: tuple[str, ...] = ()
    """Terms that are differentiated, but are no part of the reported loss and are not reported under their names."""
    addable: Mapping[str, Addable] = field(default_factory=dict)
    """Numbers of a `VectorMetric` of this name, and what evaluations make of them."""

    def __add__(self, other: Reported) -> Reported:
        return Reported(
            self.counts + other.counts,
            {**self.terms, **other.terms},
            self.means + other.means,
            self.sums + other.sums,
            self.largest + other.largest,
            self.smallest + other.smallest,
            {**self.differences, **other.differences},
            self.apart + other.apart,
            {**self.addable, **other.addable},
        )


def metrics_reported(
    means: tuple[str, ...] = (), largest: tuple[str, ...] = (), smallest: tuple[str, ...] = ()
) -> Reported:
    """Return the declaration of metrics that several losses share, for the sum with a loss's own."""
    return Reported((), {}, means, largest=largest, smallest=smallest)


class Loss(Protocol):
    """An objective. Pure: no state, no logits, no groups."""

    @property
    def needs(self) -> RequestedModelOutputs:
        """What it asks of the model."""

    @property
    def reported(self) -> Reported:
        """The names of its counts, terms and metrics."""

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return this micro-batch's part of the numbers by which terms are divided; the engine sums them over the
        global batch."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """Terms and metrics of one micro-batch: all that are `reported`, and no others."""
