"""KTO against TRL's own loss, z0 from mismatched answers included; BCO, which TRL no longer has, by hand.

Covers: megaswift/losses/contract.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.data.preference.collate import kto_kl_batches
from megaswift.losses.contract import Batch, RequestedModelOutputs
from megaswift.losses.kto import KTO, log_ratios
from tests.losses import bigram, trainers
from tests.losses.bigram import SHAPE, Bigram, Doc, assert_same, assert_same_metrics, documents, reference_of, run

DOCS = documents([(3, 5), (2, 2), (1, 7), (6, 1), (2, 9), (4, 3), (1, 1)])
LABELS = [True, False, False, True, True, False, True]
TOKENS = sum(len(d.ids) for d in DOCS)
CASES = {
    "kto": KTO(beta=0.3),
    "kto weights": KTO(beta=0.2, desirable_weight=1.3, undesirable_weight=0.6),
    "apo": KTO("apo_zero_unpaired", beta=0.3, desirable_weight=0.5, undesirable_weight=1.25),
}


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.kto(tmp_path_factory.mktemp("kto"))


@pytest.fixture
def models() -> tuple[Bigram, Bigram]:
    """A policy that differs from its reference, so that z0 is not clamped."""
    policy, reference = Bigram(TOKENS, 1), Bigram(TOKENS, 2)
    with torch.no_grad():
        likely = torch.eye(TOKENS + 1, dtype=torch.float64).roll(1, 1)
        policy.weight.mul_(0.3).add_(reference.weight + 2 * likely)
    return policy, reference


def theirs(
    trl: Any, loss: KTO, models: tuple[Bigram, Bigram], docs: list[Doc], labels: list[bool]
) -> tuple[float, torch.Tensor]:
    """TRL's loss of a batch made by its own collator, answers turned round as its data preparation does."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    trl.loss_type, trl.calculate_KL, trl.beta = loss.loss_type, loss.loss_type == "kto", loss.beta
    trl.desirable_weight, trl.undesirable_weight = loss.desirable_weight, loss.undesirable_weight
    trl.model, trl.ref_model = models
    answers = [d.ids[d.begin :] for d in docs]
    rows = [
        {"prompt_ids": d.ids[: d.begin], "completion_ids": a, "KL_completion_ids": k, "label": good}
        for d, a, k, good in zip(docs, answers, [answers[-1], *answers[:-1]], labels, strict=True)
    ]
    inputs = DataCollatorForUnpairedPreference(pad_token_id=TOKENS)(rows)
    return trainers.differentiated(trl.compute_loss(trl.model, inputs), trl.model.weight)


def examples(docs: list[Doc], labels: list[bool], packed: bool) -> Batch:
    made = bigram.batch(docs, packed)
    count = len(labels) or 1
    known = torch.tensor(labels or [False])
    return replace(made, fields={"examples": torch.arange(len(labels)), "label": known[:count]})


def prepared(microbatches: list[Batch], models: tuple[Bigram, Bigram]) -> list[Batch]:
    """What a trainer does before the step: reference log-probabilities, and z0 of each micro-batch."""
    policy, reference = models
    made = []
    for b, turned in zip(microbatches, kto_kl_batches(microbatches, SHAPE, max_length=64), strict=True):
        with torch.no_grad():
            found = log_ratios(
                bigram.outputs(policy, turned, RequestedModelOutputs()).logprobs, reference_of(reference, turned)
            )
        kl = found.mean().clamp(min=0) if found.numel() else torch.zeros(())
        made.append(replace(reference_of(reference, b), fields={**reference_of(reference, b).fields, "kl": kl}))
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_metrics_are_trl_s(trl: Any, models: tuple[Bigram, Bigram], case: str, packed: bool) -> None:
    loss = CASES[case]
    expected = theirs(trl, loss, models, DOCS, LABELS)
    noted = trainers.metrics(trl)
    (whole,) = prepared([examples(DOCS, LABELS, packed)], models)
    if loss.loss_type == "kto":
        assert noted["kl"] > 0.1, "z0 proves nothing"
    value, gradient, metrics = run(loss, models[0], [whole])
    assert_same((value, gradient), expected)
    assert_same_metrics(metrics, noted, () if loss.loss_type == "kto" else ("kl",))


def test_micro_batches_have_their_own_z0_and_one_normalizer(trl: Any, models: tuple[Bigram, Bigram]) -> None:
    """Three, three and one example: a mean over seven, where TRL's mean of means would weigh the last one three
    times."""
    loss = CASES["kto weights"]
    cuts = [slice(0, 3), slice(3, 6), slice(6, 7)]
    parts = [theirs(trl, loss, models, DOCS[c], LABELS[c]) for c in cuts]
    expected = tuple(sum(len(DOCS[c]) * p[i] for c, p in zip(cuts, parts, strict=True)) / 7 for i in (0, 1))
    micro = [examples(DOCS[c], LABELS[c], i % 2 == 0) for i, c in enumerate(cuts)]
    prepared_ = [b for m in (*micro, examples([], [], True)) for b in prepared([m], models)]
    value, gradient, metrics = run(loss, models[0], prepared_)
    assert_same((value, gradient), expected)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


def test_margins_need_both_sides(models: tuple[Bigram, Bigram]) -> None:
    """As TRL: no margin, and no mean of nothing, where every example is desirable."""
    _, _, metrics = run(KTO(), models[0], prepared([examples(DOCS[:2], [True, True], True)], models))
    assert (
        "rewards/chosen" in metrics
        and not {"rewards/margins", "rewards/rejected", "logps/rejected", "logits/rejected"} & metrics.keys()
    )


def test_fillers_alone_have_no_loss(models: tuple[Bigram, Bigram]) -> None:
    for packed in (False, True):
        value, gradient, metrics = run(KTO(), models[0], prepared([examples([], [], packed)], models))
        assert value == 0 and gradient.abs().max() == 0 and metrics == {}


def test_a_filler_beside_examples_counts_nothing(models: tuple[Bigram, Bigram]) -> None:
    (whole,) = prepared([examples(DOCS[:2], [True, False], True)], models)
    b = examples(DOCS[:3], [True, False, True], False)
    (with_filler,) = prepared([replace(b, fields={**b.fields, "examples": torch.tensor([0, 1])})], models)
    a, b_ = run(KTO(), models[0], [whole]), run(KTO(), models[0], [with_filler])
    assert a[0] == pytest.approx(b_[0], rel=1e-12) and torch.allclose(a[1], b_[1])


def test_bco_by_hand(models: tuple[Bigram, Bigram]) -> None:
    """-log sigmoid(r - delta) of desirable examples, -log sigmoid(delta - r) of others."""
    loss = KTO("bco", beta=0.2, undesirable_weight=0.5)
    (whole,) = prepared([examples(DOCS, LABELS, True)], models)
    delta = 0.35
    value, gradient, metrics = run(
        loss, models[0], [replace(whole, fields={**whole.fields, "delta": torch.tensor([delta])})]
    )
    policy, reference = (m.weight.log_softmax(-1) for m in models)
    losses = []
    for d, good in zip(DOCS, LABELS, strict=True):
        steps = list(zip(d.ids[d.begin - 1 :], d.ids[d.begin :], strict=False))
        reward = 0.2 * (sum(policy[a, b] for a, b in steps) - sum(reference[a, b].detach() for a, b in steps))
        losses.append(
            torch.log1p(torch.exp(-(reward - delta))) if good else 0.5 * torch.log1p(torch.exp(reward - delta))
        )
    assert_same((value, gradient), trainers.differentiated(sum(losses) / 7, models[0].weight))
    assert metrics["delta"] == pytest.approx(delta)
