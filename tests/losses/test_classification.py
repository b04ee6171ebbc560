"""Losses and metrics of classifiers against transformers' loss functions and scikit-learn's metrics, over micro-batches
and evaluation batches of unequal sizes, packed and padded, with rows that only fill up.

Covers: megaswift/losses/classification.py, megaswift/engine/reported_numbers.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.labeled.collate import collate_labeled
from megaswift.engine.reported_numbers import ReportOrder
from megaswift.losses.classification import (
    SequenceClassification,
    TokenClassification,
    f1_of_all_labels,
    f1_of_present_labels,
)
from megaswift.losses.contract import Batch, Loss, MeanMetric, ModelOutputs, VectorMetric
from megaswift.losses.options.classification import MULTI_LABEL, PROBLEM_TYPES, REGRESSION, SINGLE_LABEL
from megaswift.trainers.hooks.evaluation import AddendsOfBatches

LABELS = 4
SIZES = [[3, 5, 1], [2], [4, 4, 7, 2], [1]]
"""Tokens of the texts of each micro-batch. The last one's single token would stand for the row that only fills up."""
SHAPE = PaddingShape(doc_multiple=4, row_multiple=3)


def label(problem: str, i: int) -> list[float]:
    draw = np.random.default_rng(i)
    if problem == SINGLE_LABEL:
        return [float(draw.integers(0, 3))]  # class 3 is named by the model alone
    if problem == MULTI_LABEL:
        return [float(x) for x in draw.integers(0, 2, LABELS)]
    return [float(x) for x in draw.normal(2.0, 1.5, LABELS)]


@dataclass(frozen=True)
class Known:
    """Labels of texts by their numbers."""

    problem: str

    @property
    def width(self) -> int:
        return len(label(self.problem, 0))

    def label(self, sample: int) -> Sequence[float]:
        return label(self.problem, sample)


def microbatches(packed: bool, labels: Known | None) -> list[Batch]:
    """The texts of SIZES; the last micro-batch has a row without any."""
    number = iter(range(100))
    batches = []
    for sizes in SIZES:
        documents: list[list[Document]] = []
        for size in sizes:
            i = next(number)
            tags = np.random.default_rng(i).integers(0, LABELS, size).astype(np.uint8)  # 0: none
            mask = np.ones(size, np.uint8) if labels else tags
            documents.append([(np.arange(size, dtype=np.int32) + 10 * i, mask, i)])
        rows = [[d for row in documents for d in row]] if packed else documents
        rows += [[]] if len(batches) == len(SIZES) - 1 else []
        batches += collate_labeled([rows], packed, SHAPE, False, labels)
    return batches


def vectors(batch: Batch, labels: int) -> Tensor:
    """[b, s, labels]: numbers of each token, whatever row it lies in; zero where there is no weight, as engines give
    them."""
    table = torch.randn(400, labels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return table[batch.input_ids] * (batch.loss_weights != 0).unsqueeze(-1)


def evaluated(loss: Loss, batches: list[Batch], labels: int) -> tuple[float, dict[str, float]]:
    """The loss and the metrics over all micro-batches, each one an evaluation batch of its own."""
    order = ReportOrder(loss.reported)
    added = AddendsOfBatches()
    for batch in batches:
        counts = loss.counts(batch)
        terms, metrics = loss(ModelOutputs(vectors=vectors(batch, labels)), batch)
        shares = {t.name: t.weight * t.sum / (counts[t.denominator] or 1.0) for t in terms}
        row = order.row(shares, metrics)
        numbers = [float(x) for value in row for x in torch.as_tensor(value).reshape(-1)]
        added.add(order.named(numbers, counts).addends)
    return added.loss, added.metrics


def texts(problem: str) -> tuple[Tensor, Tensor]:
    """transformers' logits [n, labels] and labels of all texts, without any batch of ours."""
    table = torch.randn(400, LABELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = [size for micro in SIZES for size in micro]
    logits = torch.stack([table[10 * i + size - 1] for i, size in enumerate(sizes)])
    return logits, torch.tensor([label(problem, i) for i in range(len(sizes))], dtype=torch.float64)


def of_sklearn(problem: str, logits: Tensor, truth: Tensor) -> dict[str, float]:
    if problem == REGRESSION:
        pearson = np.mean([np.corrcoef(logits[:, j], truth[:, j])[0, 1] for j in range(LABELS)])
        return {"mse": sk.mean_squared_error(truth, logits), "pearson": float(pearson)}
    guess: Any = logits.argmax(-1) if problem == SINGLE_LABEL else (logits > 0).long()
    wanted: Any = truth[:, 0].long() if problem == SINGLE_LABEL else truth.long()
    return {
        "accuracy": sk.accuracy_score(wanted, guess),
        "f1_macro": sk.f1_score(wanted, guess, average="macro", zero_division=0),
        "f1_micro": sk.f1_score(wanted, guess, average="micro", zero_division=0),
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("problem", PROBLEM_TYPES)
def test_texts(problem: str, packed: bool) -> None:
    loss, metrics = evaluated(SequenceClassification(problem, LABELS), microbatches(packed, Known(problem)), LABELS)
    logits, truth = texts(problem)
    config = PretrainedConfig(num_labels=LABELS, problem_type=problem)
    labels = truth[:, 0].long() if problem == SINGLE_LABEL else truth
    assert loss == pytest.approx(ForSequenceClassificationLoss(labels, logits, config).item(), rel=1e-6)
    assert metrics == pytest.approx(of_sklearn(problem, logits, truth), rel=1e-6)


def test_one_number() -> None:
    """transformers' regression with a single label, which squeezes it."""
    batches = microbatches(False, Known(SINGLE_LABEL))
    loss, metrics = evaluated(SequenceClassification(REGRESSION, 1), batches, 1)
    table = torch.randn(400, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = [size for micro in SIZES for size in micro]
    logits = torch.stack([table[10 * i + size - 1] for i, size in enumerate(sizes)])
    truth = torch.tensor([label(SINGLE_LABEL, i)[0] for i in range(len(sizes))], dtype=torch.float64)
    config = PretrainedConfig(num_labels=1, problem_type=REGRESSION)
    assert loss == pytest.approx(ForSequenceClassificationLoss(truth, logits, config).item(), rel=1e-6)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(logits[:, 0], truth)[0, 1])


@pytest.mark.parametrize("packed", [False, True])
def test_tokens(packed: bool) -> None:
    batches = microbatches(packed, None)
    loss, metrics = evaluated(TokenClassification(LABELS - 1), batches, LABELS - 1)
    table = torch.randn(400, LABELS - 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = [size for micro in SIZES for size in micro]
    tokens = torch.tensor([10 * i + j for i, size in enumerate(sizes) for j in range(size)])
    tags = [np.random.default_rng(i).integers(0, LABELS, size) for i, size in enumerate(sizes)]
    truth = torch.tensor(np.concatenate(tags)).long() - 1
    logits = table[tokens]
    wanted = ForTokenClassification(
        logits, torch.where(truth < 0, -100, truth), PretrainedConfig(num_labels=LABELS - 1)
    )
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    kept = truth >= 0
    guess = logits.argmax(-1)[kept]
    assert metrics == pytest.approx(
        {
            "accuracy": sk.accuracy_score(truth[kept], guess),
            "f1_macro": sk.f1_score(truth[kept], guess, average="macro"),
            "f1_micro": sk.f1_score(truth[kept], guess, average="micro"),
        }
    )


def test_no_correlation_without_a_spread() -> None:
    same = SequenceClassification(REGRESSION, 1)
    batch = microbatches(False, Known(SINGLE_LABEL))[0]
    outputs = ModelOutputs(vectors=0.1 * (batch.loss_weights != 0).double().unsqueeze(-1))
    _, metrics = same(outputs, batch)
    moments = metrics["moments"]
    assert isinstance(moments, VectorMetric)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same.reported.addable["moments"].metrics(moments.value.tolist()) == {}


def test_classes_that_nobody_names() -> None:
    """Left out of the macro mean of classes, 0 in that of several labels."""
    truth, guess = [0, 0, 1, 1], [0, 0, 0, 1]
    counted = [2.0, 1.0, 0.0, 3.0, 1.0, 0.0, 2.0, 2.0, 0.0]  # hits, guesses and occurrences of three classes
    assert f1_of_present_labels(counted)["f1_macro"] == pytest.approx(sk.f1_score(truth, guess, average="macro"))
    rows = [np.eye(3)[named] for named in (truth, guess)]
    assert f1_of_all_labels(counted)["f1_macro"] == pytest.approx(sk.f1_score(*rows, average="macro", zero_division=0))


def test_a_batch_without_a_label_counts_nothing() -> None:
    batch = collate_labeled([[[], []]], False, SHAPE, False, Known(SINGLE_LABEL))[0]
    loss = SequenceClassification(SINGLE_LABEL, LABELS)
    terms, metrics = loss(ModelOutputs(vectors=vectors(batch, LABELS)), batch)
    accuracy = metrics["accuracy"]
    assert isinstance(accuracy, MeanMetric)
    assert loss.counts(batch) == {"rows": 0.0} and float(terms[0].sum) == 0.0 and float(accuracy.count) == 0.0
