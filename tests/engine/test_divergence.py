"""The divergence from a teacher and its gradient, on one and several parts of the vocabulary, against functions of TRL
in float64; their own float32 is the measure of errors. Ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.divergence import TeacherOutputs
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import Divergence
from megaswift.parallel import head_memory
from tests.engine.test_logit_fields import VOCABULARY, WIDTH, on_shards

ROWS = 64
BETAS = [0, 0.1, 0.5, 0.9, 1]
PLAIN = (1.0, None)
NONE_OF_FIELDS: dict[str, Any] = {"temperature": 3.0, "fields": (), "differentiable": ()}
"""The shard's own temperature is that of the fields."""


def _logits(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    return products * scale if softcap is None else softcap * torch.tanh(products * scale / softcap)


def _jsd(own: Tensor, taught: Tensor, divergence: Divergence) -> Tensor:
    """TRL's divergence [t] of logits [t, v]."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    rows = [
        GKDTrainer.generalized_jsd_loss(
            a[None, None], b[None, None], beta=divergence.beta, temperature=divergence.temperature, reduction="sum"
        )
        for a, b in zip(own, taught, strict=True)
    ]
    return torch.stack(rows)


def _with_gradient(products: Tensor, mix: Tensor, values: Any) -> tuple[Tensor, Tensor]:
    """`values` of products, and the gradient of their sum with the weights `mix`, in float64."""
    given = products.detach().requires_grad_()
    out = values(given)
    (out * mix.to(out)).sum().backward()
    return out.detach().double(), given.grad.double()


def _on_ranks(
    products: Tensor, mix: Tensor, teacher: Any, divergence: Divergence, ranks: int, **own: Any
) -> tuple[Tensor, Tensor, int]:
    """(values, gradient, reductions) of products [t, VOCABULARY], padded with numbers that may not be read. `teacher`
    makes a rank's outputs and head."""
    width = WIDTH if ranks > 1 else VOCABULARY
    padded = torch.full((ROWS, ranks * width), float("nan"), dtype=products.dtype)
    padded[:, :VOCABULARY] = products

    def work(rank: int, shard: VocabularyHeadShardSpec) -> tuple[Tensor, Tensor]:
        mine = padded[:, rank * width : (rank + 1) * width].clone()
        outputs, head = teacher(rank * width, width)
        rows = outputs.rows(head, divergence, shard, lambda hidden, weight: hidden @ weight.t())
        values = []
        for some in (slice(0, 40), slice(40, ROWS)):
            found, numbers = rows.divergence(mine[some], some)
            rows.write_gradient(mine[some], some, numbers, mix[some], mine[some])
            values.append(found)
        return torch.cat(values), mine

    found, reductions = on_shards([1] * ranks, work, **{**NONE_OF_FIELDS, **own})
    gradient = torch.cat([part for _, part in found], dim=1)
    assert all(torch.equal(values, found[0][0]) for values, _ in found)
    assert not gradient[:, VOCABULARY:].any()
    return found[0][0].double(), gradient[:, :VOCABULARY].double(), reductions


def _whole(taught: Tensor, common: int = VOCABULARY, factors: tuple[float, float | None] = PLAIN) -> Any:
    """A teacher whose products are given: its hidden states, with a unit matrix for a head."""

    def of_rank(first: int, width: int) -> tuple[TeacherOutputs, TeacherHead]:
        columns = max(0, min(width, common - first))
        weight = torch.eye(VOCABULARY, dtype=taught.dtype)[first : first + columns]
        return TeacherOutputs(hidden=taught), TeacherHead(weight, columns, *factors)

    return of_rank


def _error(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> list[float]:
    """The norms of the errors of values and gradients."""
    return [float((a - b).norm()) for a, b in zip(found, want, strict=True)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows."""
    monkeypatch.setattr(head_memory, "TILE_ELEMENTS", 5 * WIDTH)


def _draw(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Products of model and teacher, and the weights of rows."""
    torch.manual_seed(0)
    own = 3 * torch.randn(ROWS, VOCABULARY)
    taught = 3 * torch.randn(ROWS, VOCABULARY)
    if kind == "near":
        taught = own + 1e-3 * torch.randn(ROWS, VOCABULARY)
    if kind == "tiny":  # probabilities down to float32's smallest and beyond, on either side
        own *= 15
        taught *= 15
    return own, taught, torch.randn(ROWS)


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["far", "near", "tiny"])
@pytest.mark.parametrize("beta", BETAS)
def test_whole_vocabulary(beta: float, kind: str, ranks: int) -> None:
    """Three ranks: the last has padding alone. Values near 0 keep digits that TRL's float32 loses."""
    own, taught, mix = _draw(kind)
    for temperature in (0.7, 1.0, 2.0):
        divergence = Divergence(beta, temperature)
        want = _with_gradient(own.double(), mix, lambda x: _jsd(x, taught.double(), divergence))  # noqa: B023
        theirs = _with_gradient(own, mix, lambda x: _jsd(x, taught, divergence))  # noqa: B023
        *found, reductions = _on_ranks(own, mix, _whole(taught), divergence, ranks)
        assert reductions == 6  # three for each of two chunks
        for name, ours, limit in zip(("value", "gradient"), _error(found, want), _error(theirs, want), strict=True):
            assert ours <= 2 * limit, (name, temperature, ours, limit)
        if kind == "near":
            torch.testing.assert_close(found[0], want[0], rtol=5e-3, atol=0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("own_factors", "taught_factors"), [((0.5, None), (2.0, 3.0)), ((0.5, 2.0), PLAIN), ((2.0, 5.0), (0.25, None))]
)
def test_factors_and_soft_caps(own_factors: Any, taught_factors: Any, beta: float) -> None:
    own, taught, mix = _draw("far")
    divergence = Divergence(beta, 0.7)

    def values(given: Tensor) -> Tensor:
        return _jsd(_logits(given, *own_factors), _logits(taught.to(given), *taught_factors), divergence)

    want = _with_gradient(own.double(), mix, values)
    limits = _error(_with_gradient(own, mix, values), want)
    factors = dict(zip(("scale", "softcap"), own_factors, strict=True))
    for ranks in (1, 2):
        *found, _ = _on_ranks(own, mix, _whole(taught, factors=taught_factors), divergence, ranks, **factors)
        errors = _error(found, want)
        assert all(ours <= 2 * limit for ours, limit in zip(errors, limits, strict=True)), (errors, limits)


@pytest.mark.parametrize("common", [1, 20, WIDTH, 33])
def test_tokens_of_both(common: int) -> None:
    """A teacher with fewer tokens: both distributions are over those of both, and others get no gradient."""
    own, taught, mix = _draw("far")
    divergence = Divergence(0.5, 1.0)
    want = _with_gradient(own.double(), mix, lambda x: _jsd(x[:, :common], taught.double()[:, :common], divergence))
    for ranks in (1, 2, 3):
        *found, _ = _on_ranks(own, mix, _whole(taught, common), divergence, ranks)
        torch.testing.assert_close(found[0], want[0], rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(found[1], want[1], rtol=2e-5, atol=1e-6)
        assert not found[1][:, common:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_that_is_the_model(beta: float, dtype: torch.dtype) -> None:
    own = _draw("far")[0].to(dtype)
    for ranks in (1, 3):
        values, gradient, _ = _on_ranks(own, torch.ones(ROWS), _whole(own), Divergence(beta, 0.7), ranks)
        assert not values.any() and float(gradient.abs().max()) <= 1e-7


def test_values_are_not_negative() -> None:
    """However near the two are."""
    own = _draw("far")[0]
    for beta in BETAS:
        for distance in (1e-7, 1e-5, 1e-3):
            taught = own + distance * torch.randn(ROWS, VOCABULARY)
            values = _on_ranks(own, torch.ones(ROWS), _whole(taught), Divergence(beta), 2)[0]
            assert float(values.min()) >= -3e-7 * distance, (beta, distance, values.min())


def _largest(own: Tensor, taught: Tensor, k: int, divergence: Divergence, mask: Tensor | None = None) -> Tensor:
    """TRL's divergence [t] over a teacher's k largest of log-probabilities and the tail."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    given = taught.topk(k)
    valid = torch.ones_like(given.indices, dtype=torch.bool) if mask is None else mask
    of_model = torch.log_softmax(own / divergence.temperature, -1).gather(1, given.indices)
    parts = [x.masked_fill(~valid, -torch.inf) for x in (of_model, given.values)]
    (ours, support), (theirs, _) = (_add_tail_bucket(x, valid) for x in parts)
    return _jsd_divergence(ours, theirs, divergence.beta, support).sum(-1)


def _largest_teacher(taught: Tensor, k: int, mask: Tensor | None = None) -> Any:
    given = taught.topk(k)
    ids = given.indices if mask is None else given.indices.masked_fill(~mask, -1)
    outputs = TeacherOutputs(logprobs=given.values, ids=ids)
    return lambda first, width: (outputs, None)


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["far", "near"])
@pytest.mark.parametrize("beta", BETAS)
def test_largest_log_probabilities(beta: float, kind: str, ranks: int) -> None:
    own, taught, mix = _draw(kind)
    for temperature in (0.7, 1.0, 2.0):
        divergence = Divergence(beta, temperature)
        logprobs = torch.log_softmax(taught.double() / temperature, -1).float()
        for k in (1, 5, 16):
            want = _with_gradient(
                own.double(),
                mix,
                lambda x: _largest(x, logprobs.double(), k, divergence),  # noqa: B023
            )
            theirs = _with_gradient(own, mix, lambda x: _largest(x, logprobs, k, divergence))  # noqa: B023
            *found, reductions = _on_ranks(own, mix, _largest_teacher(logprobs, k), divergence, ranks)
            assert reductions == 4  # two for each of two chunks
            limits = _error(theirs, want)
            for name, ours, limit in zip(("value", "gradient"), _error(found, want), limits, strict=True):
                assert ours <= 2 * limit, (name, temperature, k, ours, limit)


@pytest.mark.parametrize("beta", BETAS)
def test_a_tail_of_nothing(beta: float) -> None:
    """All tokens are listed: the tail has its least probability on both sides and no gradient."""
    own, taught, mix = _draw("far")
    divergence = Divergence(beta)
    logprobs = torch.log_softmax(taught.double(), -1).float()
    want = _with_gradient(own.double(), mix, lambda x: _largest(x, logprobs.double(), VOCABULARY, divergence))
    *found, _ = _on_ranks(own, mix, _largest_teacher(logprobs, VOCABULARY), divergence, 2)
    torch.testing.assert_close(found[0], want[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_a_model_that_is_sure_of_what_is_listed(beta: float) -> None:
    """The model's tail is below the least, the teacher's is not: no gradient goes through the tail."""
    own, taught, mix = _draw("far")
    own.scatter_add_(1, taught.topk(3).indices, torch.full((ROWS, 3), 25.0))
    divergence = Divergence(beta)
    logprobs = torch.log_softmax(taught.double(), -1).float()
    want = _with_gradient(own.double(), mix, lambda x: _largest(x, logprobs.double(), 3, divergence))
    *found, _ = _on_ranks(own, mix, _largest_teacher(logprobs, 3), divergence, 2)
    torch.testing.assert_close(found[0], want[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_listed_tokens_that_are_none(beta: float) -> None:
    """Lists of several lengths, filled with -1; a token that the model does not have is in the tail too."""
    own, taught, mix = _draw("far")
    divergence = Divergence(beta)
    logprobs = torch.log_softmax(taught.double(), -1).float()
    mask = torch.arange(6) < torch.randint(1, 7, (ROWS, 1))
    want = _with_gradient(own.double(), mix, lambda x: _largest(x, logprobs.double(), 6, divergence, mask))
    *found, _ = _on_ranks(own, mix, _largest_teacher(logprobs, 6, mask), divergence, 3)
    torch.testing.assert_close(found[0], want[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=2e-5, atol=1e-6)
