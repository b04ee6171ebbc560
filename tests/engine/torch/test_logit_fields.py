"""Fields of the torch engine against plain torch in float64: values, and gradients of those that have one."""

from __future__ import annotations

import pytest
import torch

from megaswift.engine.divergence import TeacherOutputs
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.torch.logit_fields import compute_loss_fields
from megaswift.losses.contract import FIELDS, Divergence, RequestedModelOutputs
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes
from tests.engine.megatron.layers.test_head import reference


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_the_logits(dtype: torch.dtype) -> None:
    """The head's product gets it, in its own dtype, through a model's factor and soft cap."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16).to(dtype).requires_grad_() for n in (11, 40))
    labels, needs = torch.randint(0, 40, (11,)), RequestedModelOutputs()
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = torch.tanh(torch.nn.functional.linear(hidden, weight) / 3) * 3
    compute_loss_fields(logits, labels, needs)[0].sum().backward()
    assert float(logits.detach().float().sum(-1).abs().max()) < 0.1  # as of a softmax's gradient
    want = torch.log_softmax(torch.tanh(wide[0] @ wide[1].t() / 3) * 3, -1).gather(1, labels[:, None]).sum()
    want.backward()
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for got, right in zip((hidden.grad, weight.grad), (wide[0].grad, wide[1].grad), strict=True):
        assert float((got.double() - right).norm() / right.norm()) < limit


@pytest.mark.parametrize("apart", [frozenset(), frozenset({"logprobs"})])
def test_the_divergence_beside_the_fields(apart: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time; both gradients are made of the logits before they are overwritten."""
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", HeadChunkSizes(0, 3 * 40 * 4, 1))
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 40, requires_grad=True)
    labels = torch.randint(0, 40, (2, 5))
    hidden = torch.randn(2, 5, 6)
    weight = torch.randn(30, 6)
    needs = RequestedModelOutputs(without_gradient=apart, divergence=Divergence(0.3, 2.0))
    teacher = TeacherOutputs(hidden=hidden), TeacherHead(weight, 30)
    out = compute_loss_fields(logits * 1.0, labels, needs, teacher)
    wide = logits.detach().double().requires_grad_()
    q = (wide[..., :30] / 2).softmax(-1)
    p = (hidden.double() @ weight.double().t() / 2).softmax(-1)
    m = 0.3 * p + 0.7 * q
    want = (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(-1)
    logprobs = wide.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(out.double(), torch.stack([logprobs, want]), rtol=1e-6, atol=1e-6)
    mix = torch.randn(2, 2, 5)
    (out * mix).sum().backward()
    ((0.0 if apart else (logprobs * mix[0]).sum()) + (want * mix[1]).sum()).backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)


def test_a_model_that_keeps_its_logits_is_noticed() -> None:
    """Its backward pass would read a gradient in their place."""
    hidden = torch.randn(11, 40, requires_grad=True)
    logits = torch.exp(hidden)  # of all operations one whose gradient is computed from its output
    loss = compute_loss_fields(logits, torch.zeros(11, dtype=torch.long), RequestedModelOutputs())[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_backward_pass_runs_once() -> None:
    logits = torch.randn(11, 40, requires_grad=True) * 1.0
    loss = compute_loss_fields(logits, torch.zeros(11, dtype=torch.long), RequestedModelOutputs())[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="has run already"):
        loss.backward()
