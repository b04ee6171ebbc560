"""CPO, SimPO and AlphaPO against TRL's own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.config import load_config
from megaswift.config.variants import values_with
from megaswift.losses.cpo import CPO, LOSS_TYPES
from megaswift.run.tasks import TASKS
from tests.losses import trainers
from tests.losses.bigram import Bigram, Doc, assert_same, assert_same_metrics, documents, padded, pairs, run

DOCS = documents([(3, 5), (3, 2), (1, 1), (1, 7), (6, 4), (6, 4), (2, 9), (2, 3)])
TOKENS = sum(len(d.ids) for d in DOCS)
CASES = {
    **{name: CPO(name, beta=0.3) for name in LOSS_TYPES},
    **{f"{name} without sft": CPO(name, beta=0.5, cpo_alpha=0.0) for name in LOSS_TYPES},
    **{
        f"{name} smoothed": CPO(name, beta=0.3, label_smoothing=0.15)
        for name in LOSS_TYPES
        if name in values_with("label_smoothing", "loss_type")
    },
    **{f"{name} alpha": CPO(name, beta=0.3, alpha=0.2, cpo_alpha=0.4) for name in LOSS_TYPES},
    "simpo gamma": CPO("simpo", beta=2.0, simpo_gamma=1.4),
    "alphapo": CPO("simpo", beta=2.0, cpo_alpha=0.0, alpha=-0.25),
}


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.cpo(tmp_path_factory.mktemp("cpo"))


def columns(docs: list[Doc]) -> dict[str, torch.Tensor]:
    """A batch as TRL's collator makes it: labels are -100 on prompts and padding."""
    found = {}
    for side, mine in (("chosen", docs[::2]), ("rejected", docs[1::2])):
        rows = padded(mine, TOKENS)
        found[f"{side}_input_ids"], found[f"{side}_attention_mask"] = rows["input_ids"], rows["attention_mask"]
        found[f"{side}_labels"] = rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)
    return found


@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_metrics_are_trl_s(trl: Any, case: str) -> None:
    loss = CASES[case]
    for name in ("loss_type", "beta", "label_smoothing", "cpo_alpha", "simpo_gamma", "alpha"):
        setattr(trl, name, getattr(loss, name))
    model = Bigram(TOKENS, 1)
    value, noted = trl.get_batch_loss_metrics(model, columns(DOCS))
    expected = trainers.differentiated(value, model.weight)
    # TRL means its logits over prompts and padding too; here they are the answers', as in its DPO.
    without = ("logits/chosen", "logits/rejected", *([] if loss.cpo_alpha else ["nll_loss"]))
    for microbatches in (
        [pairs(DOCS, False)],
        [pairs(DOCS, True)],
        [pairs(DOCS[:2], True), pairs([], True), pairs(DOCS[2:], False)],
    ):
        value, gradient, metrics = run(loss, model, microbatches)
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted, without)


def test_alphapo_is_trl_s_name_for_settings(tmp_path: Path) -> None:
    """Its default margin is 0.5, ours that of SimPO's authors."""
    from trl.experimental.cpo import CPOConfig

    theirs = CPOConfig(
        str(tmp_path), loss_type="alphapo", alpha=-0.25, beta=2.0, simpo_gamma=0.7, use_cpu=True, bf16=False
    )
    words = ["--loss_type", "alphapo", "--alpha", "-0.25", "--beta", "2", "--simpo_gamma", "0.7"]
    assert TASKS.get("cpo").loss(load_config("cpo", words, environ={})) == CPO(
        theirs.loss_type, theirs.beta, theirs.label_smoothing, theirs.cpo_alpha, theirs.simpo_gamma, theirs.alpha
    )


def test_logits_are_those_of_answers() -> None:
    model = Bigram(TOKENS, 1)
    _, _, metrics = run(CPO(), model, [pairs(DOCS, True)])
    after = torch.tensor([t for d in DOCS[::2] for t in d.ids[d.begin - 1 : -1]])
    assert metrics["logits/chosen"] == pytest.approx(model.weight[after].mean().item())


def test_a_very_unlikely_answer_has_a_finite_alphapo_reward() -> None:
    """TRL takes exp(log p) first, which is 0 for long answers, and 0 to a negative power is infinite."""
    model = Bigram(TOKENS, 1)
    with torch.no_grad():
        model.weight.mul_(100)
    assert run(CPO(alpha=0.01), model, [pairs(DOCS, True)])[0] < float("inf")


def test_fillers_alone_have_no_loss() -> None:
    value, gradient, metrics = run(CPO("simpo"), Bigram(TOKENS, 1), [pairs([], True)])
    assert value == 0 and gradient.abs().max() == 0 and metrics == {}
