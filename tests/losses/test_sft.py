"""Cross-entropy with label smoothing beside transformers' LabelSmoother, value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from megaswift.engine.torch.logit_fields import compute_loss_fields
from megaswift.losses.contract import ModelOutputs
from megaswift.losses.sft import CrossEntropy

ROWS, LENGTH, VOCABULARY = 3, 7, 11


@pytest.mark.parametrize("smoothing", [0.1, 0.5, 0.0])
def test_label_smoothing_is_transformers_own(smoothing: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, LENGTH, VOCABULARY, dtype=torch.float64).float().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labeled = torch.rand(ROWS, LENGTH) < 0.6
    loss = CrossEntropy(smoothing)
    fields = compute_loss_fields(logits, labels, loss.needs) * labeled
    batch = SimpleNamespace(loss_weights=labeled.float())
    outputs = ModelOutputs(**dict(zip(loss.needs.names, fields, strict=True)))
    (term,), metrics = loss(outputs, batch)  # type: ignore[arg-type]
    mine = term.sum / loss.counts(batch)["label_weight"]  # type: ignore[arg-type]
    theirs = LabelSmoother(epsilon=smoothing)({"logits": logits}, labels.where(labeled, -100))
    assert float(mine) == pytest.approx(float(theirs), rel=1e-6)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert "token_accuracy" in metrics


def test_no_field_is_computed_that_the_loss_does_not_read() -> None:
    assert CrossEntropy().needs.fields == {"logprobs", "correct"}
    assert CrossEntropy(0.1).needs.fields == {"logprobs", "correct", "logsumexp", "mean_logit"}
