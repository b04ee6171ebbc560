"""A language model whose tokens have a row of logits each, so that its gradient is that of every single label.

Documents here never repeat a token: row t of the table is the prediction after token t, wherever a layout puts it, and
one table serves TRL's padded rows and our packed ones. Reductions are written out plainly; nothing of the engines is
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megaswift.data.batches.collate import PaddingShape, collate_packed, collate_rows
from megaswift.losses.contract import (
    Batch,
    Loss,
    LossTerm,
    MaxMetric,
    MeanMetric,
    Metric,
    MinMetric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)
from megaswift.losses.policy import PolicyLoss

SHAPE = PaddingShape(doc_multiple=4, row_multiple=3)


@dataclass(frozen=True)
class Doc:
    """Token ids and where the answer begins."""

    ids: list[int]
    begin: int

    @property
    def mask(self) -> list[int]:
        return [int(i >= self.begin) for i in range(len(self.ids))]

    def collated(self, every: bool = False) -> tuple[np.ndarray, np.ndarray, int]:
        mask = [1] * len(self.ids) if every else self.mask
        return np.array(self.ids, dtype=np.int32), np.array(mask, dtype=np.uint8), self.ids[0]


def documents(lengths: Sequence[tuple[int, int]]) -> list[Doc]:
    """Documents of (prompt, answer) lengths, each token with an id of its own."""
    starts = np.cumsum([0, *(sum(n) for n in lengths)]).tolist()
    return [Doc(list(range(a, a + p + c)), p) for a, (p, c) in zip(starts, lengths, strict=False)]


class Bigram(nn.Module):
    """`weight[t]`: logits after token t. The last token pads."""

    is_gradient_checkpointing = False

    def __init__(self, tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        drawn = torch.randn(tokens + 1, tokens + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.weight = nn.Parameter((1.5 * drawn).to(dtype))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        """Logits, and what TRL's fused head returns when labels are given."""
        logits = self.weight[input_ids]
        found = SimpleNamespace(logits=logits, aux_loss=None)
        if labels is not None:
            known = labels[:, 1:] != -100
            for name, value in fields(logits[:, :-1], labels[:, 1:].clamp(min=0)).items():
                setattr(found, name, value * known if value.dtype != torch.bool else value & known)
        return found


def fields(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What a head computes of logits [.., v] and labels [..], under TRL's names."""
    logp = logits.log_softmax(-1)
    return {
        "log_probs": logp.gather(-1, labels[..., None])[..., 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == labels,
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
    }


NAMES = {
    "logprobs": "log_probs",
    "entropy": "entropy",
    "correct": "is_top1",
    "mean_logit": "mean_logits",
    "log_sum_sq": "log_sum_sq_probs",
}


def outputs(model: Bigram, batch: Batch, needs: RequestedModelOutputs) -> ModelOutputs:
    """What an engine gives a loss: the needed fields, 0 where there is no label."""
    found = fields(model.weight[batch.input_ids], batch.labels.clamp(min=0))
    labeled = batch.loss_weights != 0
    return ModelOutputs(**{name: found[NAMES[name]] * labeled for name in needs.fields})


def batch(docs: Sequence[Doc], packed: bool, every: bool = False) -> Batch:
    """A micro-batch; `every`: all labels count. No documents: a filler."""
    pad = PaddingShape(SHAPE.doc_multiple, SHAPE.row_multiple, pad_id=-1)
    rows = [d.collated(every) for d in docs]
    if packed:
        made = collate_packed([rows], pad, [pad.packed_length(rows)])
    else:
        made = collate_rows(rows or [None], pad, pad.row_length(max((len(d.ids) for d in docs), default=1)))
    return made


def reference_of(model: Bigram, b: Batch) -> Batch:
    """The batch with the reference's log-probabilities."""
    with torch.no_grad():
        return replace(b, fields={**b.fields, "reference": outputs(model, b, RequestedModelOutputs()).logprobs})


def pairs(docs: Sequence[Doc], packed: bool, every: bool = False) -> Batch:
    """A micro-batch of chosen_0, rejected_0, chosen_1, ...; with `every`, `completion` says which labels are the
    answers'."""
    made = batch(docs, packed, every)
    numbers = torch.arange(len(docs)).view(-1, 2)
    completion = {"completion": batch(docs, packed).loss_weights} if every else {}
    return replace(made, fields={"pairs": numbers, **completion})


def padded(docs: Sequence[Doc], pad: int) -> dict[str, Tensor]:
    """TRL's padded rows."""
    width = max(len(d.ids) for d in docs)

    def rows(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([v + [fill] * (width - len(v)) for v in values])

    return {
        "input_ids": rows([d.ids for d in docs], pad),
        "attention_mask": rows([[1] * len(d.ids) for d in docs], 0),
        "completion_mask": rows([d.mask for d in docs], 0),
    }


def reduced(parts: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Metrics over micro-batches."""
    found: dict[str, float] = {}
    for name, kind in {n: type(m) for p in parts for n, m in p.items()}.items():
        mine: list[Any] = [p[name] for p in parts]
        if kind is MeanMetric and (count := float(sum(m.count for m in mine))):
            found[name] = float(sum(m.sum for m in mine)) / count
        elif kind in (MaxMetric, MinMetric):
            found[name] = (max if kind is MaxMetric else min)(float(m.value) for m in mine)
    return found


def run(loss: Loss, model: Bigram, microbatches: Sequence[Batch]) -> tuple[float, Tensor, dict[str, float]]:
    """(objective, its gradient by the table, metrics), each term divided once by its global count."""
    fields = microbatches[0].fields
    if isinstance(loss, PolicyLoss):
        loss = replace(loss, knows_sampler="sampled" in fields, corrects="ratio" in fields)
    counts: dict[str, float] = {}
    for b in microbatches:
        assert loss.counts(b).keys() == {*loss.reported.counts}
        for name, value in loss.counts(b).items():
            counts[name] = counts.get(name, 0.0) + value
    parts = [loss(outputs(model, b, loss.needs), b) for b in microbatches]
    total = sum(t.weight * t.sum / (counts[t.denominator] or 1.0) for terms, _ in parts for t in terms)
    assert isinstance(total, Tensor)
    (gradient,) = torch.autograd.grad(total, [model.weight])
    for terms, metrics in parts:
        check_declared(loss.reported, terms, metrics)
    found = reduced([dict(m) for _, m in parts])
    differences = {n: pair for n, pair in loss.reported.differences.items() if {*pair} <= found.keys()}
    return total.item(), gradient, found | {n: found[of] - found[less] for n, (of, less) in differences.items()}


def check_declared(reported: Reported, terms: Sequence[LossTerm], metrics: Mapping[str, Metric]) -> None:
    """What a loss returned is what it had declared."""
    kinds = {MeanMetric: reported.means, MaxMetric: reported.largest, MinMetric: reported.smallest}
    assert {t.name: t.denominator for t in terms} == reported.terms
    assert all({n for n, m in metrics.items() if isinstance(m, kind)} == {*names} for kind, names in kinds.items())


def assert_same(ours: tuple[float, Tensor], theirs: tuple[float, Tensor], tolerance: float = 1e-6) -> None:
    """Value and gradient agree, by the largest entry."""
    assert abs(ours[0] - theirs[0]) <= tolerance * max(abs(theirs[0]), 1e-3)
    largest = theirs[1].abs().max().item()
    assert largest > 1e-4, "a gradient that proves nothing"
    assert (ours[1] - theirs[1]).abs().max().item() <= tolerance * largest


def assert_same_metrics(ours: dict[str, float], theirs: dict[str, float], without: tuple[str, ...] = ()) -> None:
    """Every metric that TRL reports, but those named, has the same value here."""
    assert theirs.keys() - {"num_tokens", *without} <= ours.keys()
    for name in theirs.keys() - {"num_tokens", *without}:
        assert abs(ours[name] - theirs[name]) <= 2e-6 * max(1.0, abs(theirs[name])), (name, ours[name], theirs[name])
