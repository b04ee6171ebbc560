"""Fields of the torch engine against plain torch in float64: values, and gradients of those that have one."""

from __future__ import annotations

import pytest
import torch

from megaswift.engine.torch.loss_fields_from_logits import compute_loss_fields
from megaswift.losses.contract import FIELDS, RequestedModelOutputs
from tests.engine.megatron.layers.test_vocab_head import reference


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "without_gradient",
    [frozenset(), frozenset({"entropy", "mean_logit", "log_sum_sq"}), frozenset(FIELDS) - {"entropy"}],
)
def test_fields_and_gradients(temperature: float, without_gradient: frozenset[str]) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(11, 40, requires_grad=True), torch.randint(0, 40, (11,))
    needs = RequestedModelOutputs(frozenset(FIELDS), without_gradient, temperature)
    out = compute_loss_fields(logits, labels, needs)
    want = reference(logits.double(), torch.eye(40, dtype=torch.float64), labels, 40, temperature)
    mix = torch.randn(len(FIELDS), 11)
    for i, name in enumerate(needs.names):
        torch.testing.assert_close(out[i].double(), want[name], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad((out * mix).sum(), logits)
    objective = sum((want[n] * mix[i]).sum() for i, n in enumerate(needs.names) if n in needs.differentiable)
    torch.testing.assert_close(gradient, torch.autograd.grad(objective, logits)[0], rtol=1e-5, atol=1e-6)


def test_without_gradient_names_requested_fields_only() -> None:
    with pytest.raises(AssertionError, match="not among the fields"):
        RequestedModelOutputs(frozenset({"logprobs"}), frozenset({"entropy"}))
