"""ORPO against TRL's own loss; its likelihood covers prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.losses.orpo import ORPO
from tests.losses import trainers
from tests.losses.bigram import Bigram, assert_same, assert_same_metrics, pairs, run
from tests.losses.test_cpo import DOCS, TOKENS, columns


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.orpo(tmp_path_factory.mktemp("orpo"))


@pytest.mark.parametrize(("beta", "likely"), [(0.1, 0.0), (0.7, 0.0), (0.7, 6.0)])
def test_value_gradient_and_metrics_are_trl_s(trl: Any, beta: float, likely: float) -> None:
    """`likely` answers: 1 - p close to 0, where log(1 - p) takes its other form."""
    model = Bigram(TOKENS, 1)
    with torch.no_grad():
        model.weight.add_(likely * torch.eye(TOKENS + 1).roll(1, 1))
    trl.beta = beta
    value, noted = trl.get_batch_loss_metrics(model, columns(DOCS))
    expected = trainers.differentiated(value, model.weight)
    without = ("logits/chosen", "logits/rejected")
    for cut in ([(DOCS, False)], [(DOCS, True)], [(DOCS[:2], True), ([], True), (DOCS[2:], False)]):
        value, gradient, metrics = run(ORPO(beta), model, [pairs(docs, packed, every=True) for docs, packed in cut])
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted, without)


def test_without_a_completion_field_the_likelihood_is_the_answers() -> None:
    model = Bigram(TOKENS, 1)
    only = pairs(DOCS, True)
    both = pairs(DOCS, True, every=True)
    a, b = run(ORPO(), model, [only]), run(ORPO(), model, [both])
    assert a[2]["log_odds_ratio"] == pytest.approx(b[2]["log_odds_ratio"]) and a[2]["nll_loss"] != pytest.approx(
        b[2]["nll_loss"]
    )
    logp = model.weight.log_softmax(-1)
    steps = [(x, y) for d in DOCS[::2] for x, y in zip(d.ids[d.begin - 1 :], d.ids[d.begin :], strict=False)]
    assert a[2]["nll_loss"] == pytest.approx(-sum(logp[x, y].item() for x, y in steps) / len(steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_answer_known_by_heart_has_a_finite_loss(dtype: torch.dtype) -> None:
    """Its probability rounds to 1; log(1 - 1) would be -inf and the gradient nan."""
    model = Bigram(TOKENS, 1, dtype)
    with torch.no_grad():
        model.weight.add_(200 * torch.eye(TOKENS + 1).roll(1, 1))
    value, gradient, _ = run(ORPO(), model, [pairs(DOCS, True, every=True)])
    assert abs(value) < 100 and gradient.isfinite().all()


def test_fillers_alone_have_no_loss() -> None:
    filler = pairs([], True)
    filler = replace(filler, fields={**filler.fields, "completion": filler.loss_weights != 0})
    value, gradient, metrics = run(ORPO(), Bigram(TOKENS, 1), [filler])
    assert value == 0 and gradient.abs().max() == 0 and metrics == {}
