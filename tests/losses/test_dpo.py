"""DPO's losses against TRL's own: value, gradient of every label, metrics; every type and option, packed, padded, in
micro-batches.

Covers: megaswift/losses/dpo_loss_types.py, megaswift/losses/preference_pairs.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.config.variants import values_with
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import (
    DIVERGENCES,
    LOSS_TYPES,
    SFT,
    DpoSettings,
    PairLogprobsAndRatios,
    divergence_scores,
)
from megaswift.losses.preference_pairs import PairTensors
from tests.losses import trainers
from tests.losses.bigram import (
    Bigram,
    Doc,
    assert_same,
    assert_same_metrics,
    documents,
    padded,
    pairs,
    reference_of,
    run,
)

DOCS = documents([(3, 5), (3, 2), (1, 1), (1, 7), (6, 4), (6, 4), (2, 9), (2, 3), (4, 1), (4, 2)])
"""Five pairs: the chosen answer longer, much shorter, as long, ..."""
TOKENS = sum(len(d.ids) for d in DOCS)
SHORT = documents([(1, 2), (1, 1), (1, 1), (2, 2)])
"""For what TRL computes in float32 only: sums that leave it a few roundings."""

BEYOND_TRL: frozenset[str] = frozenset()
"""Loss types that TRL does not have: each has a test of its own below, against its paper's formula."""
IN_TRL = [name for name in LOSS_TYPES if name not in BEYOND_TRL]


def in_trl(option: str) -> list[str]:
    """Loss types of TRL that read an option."""
    return [name for name in values_with(option, "loss_type") if name in IN_TRL]


CASES: dict[str, DPO] = {
    **{name: DPO((name,), settings=DpoSettings(0.3, 0.2 if name == "exo_pair" else 0.0)) for name in IN_TRL},
    "sft": DPO(("sft",)),
    "aot_pair": DPO(("aot_pair",)),
    **{
        f"{name} smoothed": DPO((name,), settings=DpoSettings(0.3, 0.15))
        for name in in_trl("label_smoothing")
        if name != "sigmoid"
    },
    **{
        f"{name} {f}": DPO(
            (name,), settings=DpoSettings(0.3, 0.2 if name == "exo_pair" else 0.0), f_divergence=f, f_alpha=0.3
        )
        for name in in_trl("f_divergence_type")
        for f in ("forward_kl", "js_divergence")
    },
    "discopop tau": DPO(("discopop",), settings=DpoSettings(0.2, discopop_tau=0.7)),
    "ld": DPO(ld_alpha=0.35),
    "ld ipo": DPO(("ipo",), ld_alpha=0.0),
    "ld aot": DPO(("aot",), ld_alpha=0.5),
    "wpo": DPO(use_weighting=True),
    "wpo nca": DPO(
        ("nca_pair", "ipo"), use_weighting=True
    ),  # hinge: TRL multiplies in place what its backward pass needs
    "several": DPO(("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.1), settings=DpoSettings(0.4)),
    "several unweighted": DPO(("hinge", "apo_zero")),
    "twice": DPO(("hinge", "hinge"), (0.5, 0.75)),
    "rpo": DPO(rpo_alpha=0.7),
    "rpo ld": DPO(rpo_alpha=0.7, ld_alpha=0.35),
}
ALPHAS = {
    f"{name} alpha {alpha}": DPO(
        (name,),
        settings=DpoSettings(0.3, 0.2 if name == "exo_pair" else 0.0, 0.7),
        f_divergence="alpha_divergence",
        f_alpha=alpha,
    )
    for name in in_trl("f_divergence_type")
    for alpha in (0.4, 1.0, 1.3)
}


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.dpo(tmp_path_factory.mktemp("dpo"))


def models(docs: list[Doc], dtype: torch.dtype = torch.float64) -> tuple[Bigram, Bigram]:
    """A policy not far from its reference."""
    tokens = sum(len(d.ids) for d in docs)
    policy, reference = Bigram(tokens, 1, dtype), Bigram(tokens, 2, dtype)
    with torch.no_grad():
        policy.weight.mul_(0.4).add_(reference.weight)
    return policy, reference


def theirs(trl: Any, loss: DPO, models: tuple[Bigram, Bigram], docs: list[Doc]) -> tuple[float, torch.Tensor]:
    """TRL's loss of all pairs in one batch, chosen rows before rejected ones."""
    names = [*loss.loss_types, *([] if loss.rpo_alpha is None else ["sft"])]
    weights = [
        *(loss.loss_weights or [1.0] * len(loss.loss_types)),
        *([] if loss.rpo_alpha is None else [loss.rpo_alpha]),
    ]
    trl.loss_types, trl.loss_weights = ["aot_unpaired" if n == "aot_pair" else n for n in names], weights
    trl.beta, trl.label_smoothing, trl.args.discopop_tau = (
        loss.settings.beta,
        loss.settings.label_smoothing,
        loss.settings.discopop_tau,
    )
    trl.f_divergence_type, trl.f_alpha_divergence_coef = loss.f_divergence, loss.f_alpha
    trl.ld_alpha, trl.use_weighting = loss.ld_alpha, loss.use_weighting
    trl.model, trl.ref_model = models
    inputs = padded([*docs[::2], *docs[1::2]], models[0].weight.shape[0] - 1)
    return trainers.differentiated(trl.compute_loss(trl.model, inputs), trl.model.weight)


def layouts(loss: DPO, reference: Bigram, docs: list[Doc]) -> list[list[Any]]:
    """The same pairs in one micro-batch, padded and packed, and in several with a filler where the type sees pairs one
    by one."""
    found = [[pairs(docs, False)], [pairs(docs, True)]]
    if not {"aot", "aot_unpaired"} & {*loss.weights}:
        found.append([pairs(docs[:2], True), pairs([], True), pairs(docs[2:], False), pairs([], False)])
    return [[reference_of(reference, b) for b in microbatches] for microbatches in found]


def assert_agree(trl: Any, loss: DPO, docs: list[Doc], dtype: torch.dtype = torch.float64) -> None:
    both = models(docs, dtype)
    expected = theirs(trl, loss, both, docs)
    noted = trainers.metrics(trl)
    for microbatches in layouts(loss, both[1], docs):
        value, gradient, metrics = run(loss, both[0], microbatches)
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted)


@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_metrics_are_trl_s(trl: Any, case: str) -> None:
    assert_agree(trl, CASES[case], DOCS)


@pytest.mark.parametrize("case", ALPHAS)
def test_alpha_divergences_are_trl_s(trl: Any, case: str) -> None:
    """In float32: TRL has no float64 form of this one."""
    assert_agree(trl, ALPHAS[case], SHORT, torch.float32)


def test_alpha_divergence_at_0_is_forward_kl(trl: Any) -> None:
    """(t^-1 - 1) / -1 = 1 - 1/t, which TRL has in float64."""
    both = models(DOCS)
    expected = theirs(trl, DPO(f_divergence="forward_kl"), both, DOCS)
    value, gradient, _ = run(
        DPO(f_divergence="alpha_divergence", f_alpha=0.0), both[0], [reference_of(both[1], pairs(DOCS, True))]
    )
    assert_same((value, gradient), expected)


def test_every_type_of_the_installed_config_is_here(trl: Any) -> None:
    """TRL lists its types in the error about another one."""
    theirs(trl, DPO(), models(DOCS), DOCS)
    trl.loss_types = ["nonsense"]
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        trl.compute_loss(trl.model, padded([*DOCS[::2], *DOCS[1::2]], TOKENS))
    named = set(str(error.value).split("[")[1].split("]")[0].replace("'", "").split(", "))
    assert named == {*IN_TRL, SFT}


def test_label_smoothing_of_sigmoid_is_that_of_aot_on_one_pair(trl: Any) -> None:
    """TRL's sigmoid ignores the option; its aot, with nothing to sort, is conservative DPO."""
    loss = DPO(settings=DpoSettings(0.3, 0.15))
    both = models(DOCS)
    single = [theirs(trl, replace(loss, loss_types=("aot",)), both, DOCS[i : i + 2]) for i in range(0, len(DOCS), 2)]
    value, gradient, _ = run(loss, both[0], [reference_of(both[1], pairs(DOCS, True))])
    assert_same((value, gradient), (sum(v for v, _ in single) / 5, torch.stack([g for _, g in single]).mean(0)))


def test_reference_free_by_hand() -> None:
    """Log ratios are the answers' log-probabilities, rewards beta times these."""
    policy, _ = models(DOCS)
    loss = DPO(settings=DpoSettings(0.2), reference_free=True)
    value, gradient, metrics = run(loss, policy, [pairs(DOCS, True)])
    logp = policy.weight.log_softmax(-1)
    answers = [sum(logp[a, b] for a, b in zip(d.ids[d.begin - 1 :], d.ids[d.begin :], strict=False)) for d in DOCS]
    margins = [0.2 * (c - r) for c, r in zip(answers[::2], answers[1::2], strict=True)]
    expected = sum(torch.log1p(torch.exp(-m)) for m in margins) / 5
    assert_same((value, gradient), trainers.differentiated(expected, policy.weight))
    assert metrics["rewards/chosen"] == pytest.approx(0.2 * sum(a.item() for a in answers[::2]) / 5)
    assert metrics["rewards/accuracies"] == sum(m > 0 for m in margins) / 5


def test_a_policy_equal_to_its_reference_loses_log_2() -> None:
    _, reference = models(DOCS)
    value, _, metrics = run(DPO(), reference, [reference_of(reference, pairs(DOCS, True))])
    assert value == pytest.approx(math.log(2), rel=1e-12)
    assert metrics["rewards/margins"] == 0 and metrics["rewards/accuracies"] == 0


def test_the_sft_term_is_reported_without_its_weight() -> None:
    policy, reference = models(DOCS)
    _, _, metrics = run(DPO(rpo_alpha=0.7), policy, [reference_of(reference, pairs(DOCS, True))])
    logp = policy.weight.log_softmax(-1)
    steps = [(a, b) for d in DOCS[::2] for a, b in zip(d.ids[d.begin - 1 :], d.ids[d.begin :], strict=False)]
    assert metrics["nll_loss"] == pytest.approx(-sum(logp[a, b].item() for a, b in steps) / len(steps))


def test_fillers_alone_have_no_loss_and_a_gradient_of_zero() -> None:
    policy, reference = models(DOCS)
    for loss in (DPO(("sigmoid", "aot", "sft"), ld_alpha=0.5), DPO(use_weighting=True, rpo_alpha=1.0)):
        filler = reference_of(reference, pairs([], True))
        value, gradient, metrics = run(loss, policy, [filler])
        assert value == 0 and gradient.abs().max() == 0 and metrics == {}


@pytest.mark.parametrize("name", LOSS_TYPES)
@pytest.mark.parametrize("away", [-4000.0, 4000.0])
def test_a_pair_far_from_its_reference_has_a_finite_loss(name: str, away: float) -> None:
    """In float32, with its gradient, whichever answer the policy has come to prefer."""
    logps = PairTensors(
        torch.tensor([-5000.0 + away], requires_grad=True), torch.tensor([-5000.0 - away], requires_grad=True)
    )
    reference = PairTensors(torch.tensor([-5000.0]), torch.tensor([-5000.0]))
    ratios, lengths = logps - reference, PairTensors(torch.tensor([500.0]), torch.tensor([500.0]))
    found = LOSS_TYPES[name](
        PairLogprobsAndRatios(logps, reference, ratios, ratios, lengths, DpoSettings(label_smoothing=0.1))
    )
    gradients = torch.autograd.grad(found.sum(), [logps.chosen, logps.rejected], allow_unused=True)
    assert found.isfinite().all() and all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_divergence_of_any_ratio_is_finite(divergence: str) -> None:
    ratios = PairTensors(torch.tensor([-4000.0], requires_grad=True), torch.tensor([-3000.0], requires_grad=True))
    found = divergence_scores(ratios, divergence, 0.5).difference
    gradients = torch.autograd.grad(found.sum(), [ratios.chosen, ratios.rejected])
    assert found.isfinite().all() and all(g.isfinite().all() for g in gradients)


def test_an_unknown_type_is_ours_to_prevent() -> None:
    with pytest.raises(AssertionError, match="unknown loss types"):
        DPO(("sigmoid", "dpo"))


def test_needs() -> None:
    assert "log_sum_sq" in DPO(use_weighting=True).needs.fields and "log_sum_sq" not in DPO().needs.fields
