"""The divergence by the vocabulary-parallel head against plain torch in float64: values, gradients, and what is added
to the weight's `main_grad` together with the fields'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.divergence import TeacherOutputs
from megaswift.engine.megatron.layers.divergence import compute_divergence
from megaswift.engine.megatron.layers.head import VocabularyHeadOptions, compute_vocabulary_fields
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import Divergence
from megaswift.parallel import head_memory
from tests.engine.megatron.layers.test_head import CHUNKS, with_main_grad

TOKENS, WIDTH, VOCABULARY, REAL, COMMON = 11, 8, 40, 37, 33
SHARD = VocabularyHeadShardSpec(0, REAL, None, 1.0, ("logprobs",), ("logprobs",), 0.6, 4.0)
ASKED = Divergence(0.3, 0.7)


@pytest.fixture(params=CHUNKS, autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's chunks on a CPU; tiles of two rows."""
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", CHUNKS[request.param])
    monkeypatch.setattr(head_memory, "TILE_ELEMENTS", 80)


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, TeacherOutputs, TeacherHead]:
    """Hidden states and weight of a model, and a teacher of another width with fewer tokens."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).to(dtype).requires_grad_()
    head = TeacherHead(torch.randn(VOCABULARY, 12).to(dtype), COMMON, 0.5, 3.0)
    return hidden, weight, TeacherOutputs(hidden=torch.randn(TOKENS, 12)), head


def divergence_of(given: Any, options: VocabularyHeadOptions = VocabularyHeadOptions()) -> Tensor:  # noqa: B008
    hidden, weight, outputs, head = given
    return compute_divergence(hidden, weight, (outputs, head), ASKED, SHARD, options)


def exact(given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(values, hidden states, weight), the last two to be differentiated by, in float64; the definition written out."""
    hidden, weight, outputs, head = given
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    own = 4.0 * torch.tanh(0.6 * (wide[0] @ wide[1].t()) / 4.0)
    products = outputs.hidden.to(head.weight.dtype).double() @ head.weight.double().t()
    taught = 3.0 * torch.tanh(0.5 * products / 3.0)
    q, p = ((x[:, :COMMON] / 0.7).softmax(-1) for x in (own, taught))
    m = 0.3 * p + 0.7 * q
    values = (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(-1)
    return values, wide[0], wide[1]


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


def test_value_and_gradients() -> None:
    given = draw()
    mix = torch.randn(TOKENS)
    values, hidden, weight = exact(given)
    out = divergence_of(given)
    torch.testing.assert_close(out.double(), values, rtol=2e-6, atol=2e-7)
    (out * mix).sum().backward()
    (values * mix).sum().backward()
    assert error(given[0].grad, hidden.grad) < 2e-6 and error(given[1].grad, weight.grad) < 2e-6
    assert not given[1].grad[COMMON:].any()


def test_largest_log_probabilities() -> None:
    """Every token but the last is listed, so that the tail is a token and the divergence that of whole vocabularies."""
    hidden, weight, outputs, head = draw()
    taught = 0.9 * torch.randn(TOKENS, REAL)
    logprobs = taught.double().log_softmax(-1)
    listed = TeacherOutputs(logprobs=logprobs[:, :-1].float(), ids=torch.arange(REAL - 1).expand(TOKENS, -1))
    out = compute_divergence(hidden, weight, (listed, None), ASKED, SHARD, VocabularyHeadOptions())
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    q = (4.0 * torch.tanh(0.6 * (wide[0] @ wide[1][:REAL].t()) / 4.0) / 0.7).softmax(-1)
    p = logprobs.exp()
    m = 0.3 * p + 0.7 * q
    values = (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(-1)
    torch.testing.assert_close(out.double(), values, rtol=2e-6, atol=2e-7)
    out.sum().backward()
    values.sum().backward()
    assert error(hidden.grad, wide[0].grad) < 2e-6 and error(weight.grad, wide[1].grad) < 2e-6


@pytest.mark.parametrize("options", [VocabularyHeadOptions(), VocabularyHeadOptions(float32_products=True)])
def test_half_precision(options: VocabularyHeadOptions) -> None:
    """The products and their gradient are rounded to 16 bits, unless they come in float32; what is exact then is the
    value."""
    given = draw(torch.bfloat16)
    values, hidden, weight = exact(given)
    out = divergence_of(given, options)
    assert out.dtype == torch.float32
    assert error(out, values.detach()) < (1e-5 if options.float32_products else 2e-2)
    out.sum().backward()
    values.sum().backward()
    assert error(given[0].grad, hidden.grad) < 2e-2 and error(given[1].grad, weight.grad) < 2e-2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_and_divergence_add_to_main_grad(dtype: torch.dtype, tied: bool) -> None:
    """Both, over two micro-batches; what autograd brings is the embedding's gradient of a tied weight."""
    given = draw(dtype)
    hidden, weight = given[:2]
    with_main_grad(weight, tied)
    labels = torch.randint(0, REAL, (TOKENS,))
    for _ in range(2):
        weight.grad = None
        fields = compute_vocabulary_fields(hidden, weight, labels, SHARD, VocabularyHeadOptions())
        loss = divergence_of(given).sum() - 0.3 * fields.sum() + (weight[3].sum() if tied else 0.0)
        loss.backward()
    values, wide, wide_weight = exact(given)
    own = 4.0 * torch.tanh(0.6 * (wide @ wide_weight[:REAL].t()) / 4.0)
    (values.sum() - 0.3 * own.log_softmax(-1).gather(1, labels[:, None]).sum()).backward()
    limit = 2e-6 if dtype == torch.float32 else 2e-2
    assert weight.grad_added_to_main_grad is True
    assert error(weight.main_grad.double() - 1, 2 * wide_weight.grad) < limit
    assert error(hidden.grad, 2 * wide.grad) < limit
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
    if tied:
        embedding = torch.zeros_like(weight)
        embedding[3] = 1
        assert torch.equal(weight.grad, embedding)


def test_main_grad_is_left_alone_without_fusion() -> None:
    given = draw()
    weight = with_main_grad(given[1], False)
    divergence_of(given, VocabularyHeadOptions(into_main_grad=False)).sum().backward()
    values, _, wide_weight = exact(given)
    values.sum().backward()
    assert bool((weight.main_grad == 1).all()) and weight.grad_added_to_main_grad is False
    assert error(weight.grad, wide_weight.grad) < 2e-6


def test_no_labels_at_all() -> None:
    hidden, weight, _, head = draw()
    none = hidden[:0], weight, TeacherOutputs(hidden=torch.zeros(0, 12)), head
    out = divergence_of(none)
    assert out.shape == (0,)
    out.sum().backward()
    assert not weight.grad.any()
    listed = TeacherOutputs(logprobs=torch.zeros(0, 3), ids=torch.zeros(0, 3, dtype=torch.long))
    assert divergence_of((hidden[:0], weight, listed, None)).shape == (0,)


def test_the_backward_pass_runs_once() -> None:
    loss = divergence_of(draw()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="has run already"):
        loss.backward()
