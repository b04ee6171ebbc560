"""The vocabulary head against plain torch on full logits: every field, value and gradient."""

import pytest
import torch

from megaswift.engine.megatron.layers import vocab_head
from megaswift.losses.contract import FIELDS


class OneRank:
    """A group of one: no collective is called."""

    @staticmethod
    def size() -> int:
        return 1


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


@pytest.mark.parametrize("rows_kept", [1 << 28, 4 * 40 * 3])
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
def test_fields_and_gradients(monkeypatch, rows_kept, temperature, fields, differentiable, factors):
    """The gradient is that of the differentiable fields, whatever comes back for the others. `factors`: scale, cap."""
    scale, cap = factors
    monkeypatch.setattr(vocab_head, "KEEP_BYTES", rows_kept)
    torch.manual_seed(0)
    tokens, width, vocabulary, real = 11, 8, 40, 37
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, real, (tokens,))
    names = tuple(f for f in FIELDS if f in fields)
    grads = tuple(f for f in FIELDS if f in differentiable)
    shard = vocab_head.VocabularyHeadShardSpec(0, real, OneRank(), temperature, names, grads, scale, cap)
    out = vocab_head.VocabularyHeadFunction.apply(hidden, weight, labels, shard)
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


def test_no_labels_at_all():
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(40, 8, requires_grad=True)
    out = vocab_head.VocabularyHeadFunction.apply(
        hidden,
        weight,
        torch.zeros(0, dtype=torch.long),
        vocab_head.VocabularyHeadShardSpec(0, 40, OneRank(), 1.0, ("logprobs",), ("logprobs",)),
    )
    assert out.shape == (1, 0)
    out.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("rows_kept", [1 << 28, 4 * 40 * 3])
def test_confident_tokens_keep_their_digits(monkeypatch, rows_kept):
    """p of the label as near to 1 as 1 - 1e-8: log p and the gradient 1 - p are as accurate as any other number."""
    monkeypatch.setattr(vocab_head, "KEEP_BYTES", rows_kept)
    torch.manual_seed(0)
    vocabulary = 40
    weight = (4 * torch.randn(vocabulary, 8)).round() / 4  # quarters: the logits are exact in float32
    labels = torch.arange(12)
    hidden = weight[labels] * torch.arange(1, 13)[:, None] / 4
    hidden.requires_grad_()
    shard = vocab_head.VocabularyHeadShardSpec(0, vocabulary, OneRank(), 1.0, ("logprobs",), ("logprobs",))
    out = vocab_head.VocabularyHeadFunction.apply(hidden, weight, labels, shard)[0]
    rows = hidden.detach().double().requires_grad_()
    want = reference(rows, weight.double(), labels, vocabulary, 1.0)["logprobs"]
    assert int(((want < 0) & (want > -1e-4)).sum()) >= 3, want
    one = want > -1e-9  # where float64 has too few digits for 1 - p itself
    torch.testing.assert_close(out.double()[~one], want[~one], rtol=3e-6, atol=1e-15)
    out.sum().backward()
    want.sum().backward()
    error = (hidden.grad.double() - rows.grad)[~one].norm(dim=1) / rows.grad[~one].norm(dim=1)
    assert float(error.max()) < 1e-6, error
