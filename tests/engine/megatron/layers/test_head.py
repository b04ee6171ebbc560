"""The vocabulary head against plain torch on full logits: every field, value and gradient."""

import pytest
import torch

from megaswift.engine.megatron.layers import head as layer_head
from megaswift.engine.megatron.layers.head import (
    VocabularyHeadOptions,
    compute_vocabulary_fields,
)
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import FIELDS
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes

ROWS_OF_40 = 4 * 40
CHUNKS = {
    "all kept": HeadChunkSizes(1 << 28, 1 << 28, 1),
    "four kept, the rest by threes": HeadChunkSizes(4 * ROWS_OF_40, 3 * ROWS_OF_40, 1),
    "none kept, at least five": HeadChunkSizes(0, ROWS_OF_40, 5),
}


@pytest.fixture(params=CHUNKS)
def chunks(request, monkeypatch):
    """The head's chunks on a CPU; tiles of two rows of 40."""
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", CHUNKS[request.param])
    monkeypatch.setattr(head_memory, "TILE_ELEMENTS", 80)


def reference(hidden, weight, labels, real, temperature, change=lambda logits: logits):
    logits = change(hidden @ weight[:real].t()) / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    p = log_p.exp()
    return {
        "logprobs": log_p.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(p * log_p).sum(-1),
        "logsumexp": torch.logsumexp(logits, -1),
        "correct": (logits.argmax(-1) == labels).double(),
        "mean_logit": logits.mean(-1),
        "log_sum_sq": torch.logsumexp(2 * log_p, -1),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("fields", "differentiable"),
    [
        (("logprobs",), ("logprobs",)),
        (FIELDS, [f for f in FIELDS if f != "correct"]),
        (FIELDS, ("logprobs",)),
        (FIELDS, ("entropy", "mean_logit")),
        (("entropy", "log_sum_sq"), ("entropy", "log_sum_sq")),
    ],
)
@pytest.mark.parametrize("factors", [(1.0, None), (0.6, None), (0.6, 1.5)])
def test_fields_and_gradients(chunks, temperature, fields, differentiable, factors):
    """The gradient is that of the differentiable fields, whatever comes back for the others. `factors`: scale, cap."""
    scale, cap = factors
    torch.manual_seed(0)
    tokens, width, vocabulary, real = 11, 8, 40, 37
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, real, (tokens,))
    names = tuple(f for f in FIELDS if f in fields)
    grads = tuple(f for f in FIELDS if f in differentiable)
    shard = VocabularyHeadShardSpec(0, real, None, temperature, names, grads, scale, cap)
    out = compute_vocabulary_fields(hidden, weight, labels, shard, VocabularyHeadOptions())
    want = reference(
        hidden.double(),
        weight.double(),
        labels,
        real,
        temperature,
        lambda logits: logits * scale if cap is None else cap * torch.tanh(logits * scale / cap),
    )
    mix = torch.randn(len(names), tokens)
    # float32 keeps a logit to half a unit in its last place, on every CPU; what is summed from it may lie 2 units off
    largest = float((hidden.double() @ weight.double().t()).abs().max()) * scale / temperature
    rounding = 2 * torch.finfo(torch.float32).eps * max(1.0, largest if cap is None else min(largest, cap))
    for i, name in enumerate(names):
        torch.testing.assert_close(out[i].double(), want[name], rtol=2e-6, atol=rounding)
    (out * mix).sum().backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    sum((want[n] * mix[i]).sum() for i, n in enumerate(names) if n in grads).backward()
    torch.testing.assert_close(got[0], hidden.grad, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got[1], weight.grad, rtol=1e-5, atol=2e-5)


def head(hidden, weight, labels, options=VocabularyHeadOptions(), fields=("logprobs",)):  # noqa: B008
    """Log-probabilities over the whole vocabulary."""
    shard = VocabularyHeadShardSpec(0, len(weight), None, 1.0, fields, ("logprobs",))
    return compute_vocabulary_fields(hidden, weight, labels, shard, options)


def test_no_labels_at_all():
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(40, 8, requires_grad=True)
    out = head(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert out.shape == (1, 0)
    out.sum().backward()
    assert not weight.grad.any()


def test_confident_tokens_keep_their_digits(chunks):
    """p of the label as near to 1 as 1 - 1e-8: log p and the gradient 1 - p are as accurate as any other number."""
    torch.manual_seed(0)
    vocabulary = 40
    weight = (4 * torch.randn(vocabulary, 8)).round() / 4  # quarters: the logits are exact in float32
    labels = torch.arange(12)
    hidden = weight[labels] * torch.arange(1, 13)[:, None] / 4
    hidden.requires_grad_()
    out = head(hidden, weight, labels)[0]
    rows = hidden.detach().double().requires_grad_()
    want = reference(rows, weight.double(), labels, vocabulary, 1.0)["logprobs"]
    assert int(((want < 0) & (want > -1e-4)).sum()) >= 3, want
    one = want > -1e-9  # where float64 has too few digits for 1 - p itself
    torch.testing.assert_close(out.double()[~one], want[~one], rtol=3e-6, atol=1e-15)
    out.sum().backward()
    want.sum().backward()
    error = (hidden.grad.double() - rows.grad)[~one].norm(dim=1) / rows.grad[~one].norm(dim=1)
    assert float(error.max()) < 1e-6, error


def half_inputs(dtype=torch.bfloat16, tokens=23, width=64, vocabulary=300):
    torch.manual_seed(1)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def exact(hidden, weight, labels):
    """(log-probabilities, gradient of hidden, of weight) in float64, from the same 16-bit numbers."""
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    values = torch.log_softmax(wide[0] @ wide[1].t(), -1).gather(1, labels[:, None]).squeeze(1)
    values.sum().backward()
    return values.detach(), wide[0].grad, wide[1].grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_products_are_not_rounded(chunks, dtype):
    """Of 16-bit weights: log-probabilities as accurate as in float32, where rounded products are off by their ulp."""
    hidden, weight, labels = half_inputs(dtype)
    want = exact(hidden, weight, labels)[0]
    errors = [
        float((head(hidden, weight, labels, VocabularyHeadOptions(wide))[0] - want).abs().max())
        for wide in (False, True)
    ]
    assert errors[1] < 1e-5 and errors[0] > 100 * errors[1], errors


@pytest.mark.parametrize("wide", [False, True])
def test_half_precision_gradients(chunks, wide):
    """Gradients of bfloat16 are those of float64 but for the rounding of products, logits' gradients and results."""
    hidden, weight, labels = half_inputs()
    _, *want = exact(hidden, weight, labels)
    head(hidden, weight, labels, VocabularyHeadOptions(wide)).sum().backward()
    for gradient, right in zip((hidden.grad, weight.grad), want, strict=True):
        assert float((gradient.double() - right).norm() / right.norm()) < (5e-3 if wide else 1.5e-2)


def with_main_grad(weight, tied):
    weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    if tied:
        weight.zero_out_wgrad = True
    return weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_main_grad(chunks, dtype, tied):
    """In float32, over two micro-batches, on what is there; what autograd brings is the embedding's gradient of a tied
    weight, and of no meaning otherwise, but of the right shape for a hook that asks for it."""
    hidden, weight, labels = half_inputs(dtype)
    with_main_grad(weight, tied)
    _, _, want = exact(hidden, weight, labels)
    for _ in range(2):
        weight.grad = None
        loss = head(hidden, weight, labels).sum() + (weight[3].sum() if tied else 0.0)
        loss.backward()
    assert weight.grad_added_to_main_grad is True
    added = weight.main_grad.double() - 1
    tolerance = 1e-6 if dtype == torch.float32 else 1.5e-2
    assert float((added - 2 * want).norm() / want.norm()) < 2 * tolerance
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
    if tied:
        embedding = torch.zeros_like(weight)
        embedding[3] = 1
        assert torch.equal(weight.grad, embedding)


def test_small_gradients_of_many_microbatches_are_not_lost():
    """A bfloat16 sum stops growing where an addend is below half a unit of its last place; main_grad does not."""
    hidden, weight, labels = half_inputs(tokens=8, vocabulary=16, width=8)
    with_main_grad(weight, False).main_grad.fill_(256.0)
    _, _, want = exact(hidden, weight, labels)
    for _ in range(8):
        weight.grad = None  # as the hook of Megatron-Core's DDP does
        head(hidden, weight, labels).sum().div(64).backward()
    added = weight.main_grad.double() - 256
    assert float((added - want / 8).norm() / (want / 8).norm()) < 2e-2


def test_main_grad_is_left_alone_without_fusion(chunks):
    hidden, weight, labels = half_inputs(torch.float32)
    with_main_grad(weight, False)
    head(hidden, weight, labels, VocabularyHeadOptions(into_main_grad=False)).sum().backward()
    assert bool((weight.main_grad == 1).all()) and weight.grad_added_to_main_grad is False
    torch.testing.assert_close(weight.grad.double(), exact(hidden, weight, labels)[2], rtol=1e-5, atol=1e-5)


def test_the_backward_pass_runs_once():
    """Its products are overwritten: a second one would be wrong in silence."""
    hidden, weight, labels = half_inputs(torch.float32)
    loss = head(hidden, weight, labels).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="has run already"):
        loss.backward()


def test_nothing_is_kept_without_a_backward_pass(monkeypatch):
    found = []
    monkeypatch.setattr(layer_head, "head_chunks", lambda *a: found.append(a[3]) or [])
    monkeypatch.setattr(layer_head.VocabularyHeadFunction, "apply", lambda *a: None)
    hidden, weight, labels = half_inputs()
    head(hidden, weight, labels)
    head(hidden.detach(), weight.detach(), labels)
    with torch.no_grad():
        head(hidden, weight, labels)
    assert found == [True, False, False]
