"""Losses of classifiers: of texts (one label, several, or numbers) and of tokens.

The formulas are those of transformers' `...ForSequenceClassification` and `...ForTokenClassification`. A text's output
is that of the one position of its document that has a loss weight: its last token. `batch.fields["label"]` has the
labels of texts, float32 [documents, n]: a number of a class (n = 1), or a number for each of n labels. Labels of
tokens are `batch.labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.contract import (
    SCORES,
    Addable,
    Batch,
    LossTerm,
    MeanMetric,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
    VectorMetric,
)
from megaswift.losses.document_segments import document_sums
from megaswift.losses.options.classification import MULTI_LABEL, REGRESSION, SINGLE_LABEL

LABEL = "label"
"""The field of a batch that has the labels of texts."""
COUNTED = "confusion"
MOMENTS = "moments"
ROUNDING = 1e-12
"""Share of a sum of squares below which the variance of equal numbers may come out."""


def document_outputs(batch: Batch, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return each document's output [documents, n] at its one position with a weight, and whether it has one, in the
    outputs' dtype [documents]. A document without one gets some other position's output."""
    marked = (batch.loss_weights != 0).to(torch.float64)
    places = torch.arange(marked.numel(), dtype=torch.float64, device=marked.device).view_as(marked)
    positions = document_sums(batch, marked * places).long()
    has = document_sums(batch, marked).to(vectors.dtype)
    return vectors.reshape(-1, vectors.shape[-1])[positions], has


@dataclass(frozen=True)
class SequenceClassification:
    """Cross-entropy of a class, binary cross-entropy of each label, or squared error of each number.

    Args:
        problem_type: Which of the three, by transformers' names.
        labels: The number of labels.
    """

    problem_type: str
    labels: int
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head=SCORES)

    @property
    def reported(self) -> Reported:
        """The loss, and metrics of the kind of problem; of F1 and Pearson's correlation what they are made of."""
        if self.problem_type == REGRESSION:
            pearson = Addable(1 + 5 * self.labels, pearson_of_moments)
            return Reported(("rows",), {"loss": "rows"}, means=("mse",), addable={MOMENTS: pearson})
        present = self.problem_type == SINGLE_LABEL
        counted = Addable(3 * self.labels, f1_of_present_labels if present else f1_of_all_labels)
        return Reported(("rows",), {"loss": "rows"}, means=("accuracy",), addable={COUNTED: counted})

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of `rows` with a label."""
        return {"rows": float((batch.loss_weights != 0).sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term, and the metrics."""
        assert outputs.vectors is not None
        logits, has = document_outputs(batch, outputs.vectors)  # [documents, labels], [documents]
        label = batch.fields[LABEL].to(logits.dtype)
        losses = self._losses(logits, label)
        return [LossTerm("loss", (losses * has).sum(), "rows")], self._metrics(logits.detach(), label, has)

    def _losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss of each document, [documents]."""
        if self.problem_type == SINGLE_LABEL:
            return F.cross_entropy(logits, label[:, 0].long(), reduction="none")
        if self.problem_type == MULTI_LABEL:
            return F.binary_cross_entropy_with_logits(logits, label, reduction="none").mean(-1)
        return (logits - label).square().mean(-1)

    def _metrics(self, logits: Tensor, label: Tensor, has: Tensor) -> dict[str, Metric]:
        if self.problem_type == REGRESSION:
            squares = ((logits - label).square().mean(-1) * has).sum()
            return {"mse": MeanMetric(squares, has.sum()), MOMENTS: VectorMetric(_moments(logits, label, has))}
        if self.problem_type == SINGLE_LABEL:
            guess = F.one_hot(logits.argmax(-1), self.labels)
            truth = F.one_hot(label[:, 0].long(), self.labels)
        else:
            guess = (logits > 0).long()
            truth = (label > 0).long()
        right = (guess == truth).all(-1)
        return {
            "accuracy": MeanMetric((right * has).sum(), has.sum()),
            COUNTED: VectorMetric(_counted(guess, truth, has)),
        }


@dataclass(frozen=True)
class TokenClassification:
    """Cross-entropy of each labeled token's class.

    Args:
        labels: The number of labels.
    """

    labels: int
    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head=SCORES)

    @property
    def reported(self) -> Reported:
        """The loss, the accuracy, and what F1 is made of."""
        counted = Addable(3 * self.labels, f1_of_present_labels)
        return Reported(("labels",), {"loss": "labels"}, means=("accuracy",), addable={COUNTED: counted})

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of labeled tokens, `labels`."""
        return {"labels": float((batch.loss_weights != 0).sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term, and the metrics."""
        assert outputs.vectors is not None
        logits = outputs.vectors.reshape(-1, self.labels)
        has = (batch.loss_weights.flatten() != 0).to(logits.dtype)
        label = torch.where(has != 0, batch.labels.flatten(), 0)
        total = (F.cross_entropy(logits, label, reduction="none") * has).sum()
        guess = logits.detach().argmax(-1)
        counted = _counted(F.one_hot(guess, self.labels), F.one_hot(label, self.labels), has)
        accuracy = MeanMetric(((guess == label) * has).sum(), has.sum())
        return [LossTerm("loss", total, "labels")], {"accuracy": accuracy, COUNTED: VectorMetric(counted)}


# ---- what metrics are made of, and how


def _counted(guess: Tensor, truth: Tensor, has: Tensor) -> Tensor:
    """Count each label's hits, guesses and occurrences: float64 [3 x labels].

    Args:
        guess: int64 [n, labels], 1 where the model says that the label holds.
        truth: The same of the data.
        has: [n], 0 for what is left out.
    """
    weight = has.double().unsqueeze(-1)
    return torch.cat([(one * weight).sum(0) for one in (guess * truth, guess, truth)])


def _f1(counted: Sequence[float], absent_counts: bool) -> dict[str, float]:
    labels = len(counted) // 3
    hits, guesses, truths = (counted[i * labels : (i + 1) * labels] for i in range(3))
    sizes = [guess + truth for guess, truth in zip(guesses, truths, strict=True)]
    scores = [2 * hit / size if size else 0.0 for hit, size in zip(hits, sizes, strict=True)]
    kept = [score for score, size in zip(scores, sizes, strict=True) if size or absent_counts]
    total = sum(sizes)
    if not total:
        return {}
    return {"f1_macro": sum(kept) / len(kept), "f1_micro": 2 * sum(hits) / total}


def f1_of_present_labels(counted: Sequence[float]) -> dict[str, float]:
    """Return macro and micro F1 from `_counted`; the macro mean leaves out labels that neither data nor model name, as
    scikit-learn does for classes."""
    return _f1(counted, absent_counts=False)


def f1_of_all_labels(counted: Sequence[float]) -> dict[str, float]:
    """Return the same with 0 for a label that neither data nor model name, as scikit-learn does for several labels."""
    return _f1(counted, absent_counts=True)


def _moments(guess: Tensor, truth: Tensor, has: Tensor) -> Tensor:
    """Sum up n, and for each label x, y, x^2, y^2 and xy: float64 [1 + 5 x labels]."""
    x = guess.double()
    y = truth.double()
    weight = has.double()
    sums = [(one * weight.unsqueeze(-1)).sum(0) for one in (x, y, x * x, y * y, x * y)]
    return torch.cat([weight.sum().reshape(1), *sums])


def pearson_of_moments(moments: Sequence[float]) -> dict[str, float]:
    """Return the mean over labels of Pearson's correlation, from `_moments`; nothing where a label or a guess is the
    same everywhere."""
    n, *rest = moments
    labels = len(rest) // 5
    found = []
    for i in range(labels):
        x, y, xx, yy, xy = rest[i::labels]
        of_x = n * xx - x * x
        of_y = n * yy - y * y
        if of_x <= ROUNDING * n * xx or of_y <= ROUNDING * n * yy:
            return {}
        found.append((n * xy - x * y) / (of_x * of_y) ** 0.5)
    return {"pearson": sum(found) / len(found)} if found else {}
