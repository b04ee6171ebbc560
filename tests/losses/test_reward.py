"""The reward model's loss against TRL's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaswift.losses.contract import Batch, Metric, ModelOutputs
from megaswift.losses.reward import RewardLoss, weight_last_tokens_only
from tests.losses import trainers
from tests.losses.bigram import assert_same, assert_same_metrics, documents, padded, pairs, reduced

DOCS = documents([(3, 5), (3, 2), (1, 1), (1, 7), (6, 4), (6, 4)])
TOKENS = sum(len(d.ids) for d in DOCS)
MARGIN = [0.0, 1.5, 0.3]


class Scores(nn.Module):
    """A score for each token; a document's is its last token's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(TOKENS + 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """[b, 1], as a sequence classifier with one label."""
        last = input_ids.gather(1, attention_mask.sum(1, keepdim=True) - 1)
        return SimpleNamespace(logits=self.weight[last])


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.reward(tmp_path_factory.mktemp("reward"))


def batch(numbers: list[int], packed: bool, margin: bool) -> Batch:
    docs = [DOCS[i] for n in numbers for i in (2 * n, 2 * n + 1)]
    made = weight_last_tokens_only(pairs(docs, packed))
    marked = made.input_ids[made.loss_weights != 0]
    assert marked.tolist() == [d.ids[-1] for d in docs]
    return replace(
        made, fields={**made.fields, **({"margin": torch.tensor([MARGIN[n] for n in numbers])} if margin else {})}
    )


def run(loss: RewardLoss, model: Scores, microbatches: list[Batch]) -> tuple[float, Tensor, dict[str, float]]:
    count = sum(loss.counts(b)["pairs"] for b in microbatches) or 1.0
    parts: list[dict[str, Metric]] = []
    total = torch.zeros((), dtype=torch.float64)
    for b in microbatches:
        terms, metrics = loss(ModelOutputs(values=model.weight[b.input_ids] * (b.loss_weights != 0)), b)
        total = total + sum(t.weight * t.sum / count for t in terms)
        parts.append(dict(metrics))
    (gradient,) = torch.autograd.grad(total, [model.weight])
    return total.item(), gradient, reduced(parts)


@pytest.mark.parametrize(
    ("centring", "margin", "sign"), [(None, False, 1), (None, True, -1), (0.01, False, -1), (0.4, True, 1)]
)
def test_value_gradient_and_metrics_are_trl_s(trl: Any, centring: float | None, margin: bool, sign: int) -> None:
    """`sign` turns the scores round, so that the smallest is once a chosen, once a rejected document's."""
    model = Scores()
    with torch.no_grad():
        model.weight.mul_(sign)
    trl.args.center_rewards_coefficient, trl.model = centring, model
    inputs = padded([*DOCS[::2], *DOCS[1::2]], TOKENS)
    del inputs["completion_mask"]
    if margin:
        inputs["margin"] = torch.tensor(MARGIN)
    expected = trainers.differentiated(trl.compute_loss(model, inputs), model.weight)
    noted = trainers.metrics(trl)
    loss = RewardLoss(centring)
    for cut in ([([0, 1, 2], False)], [([0, 1, 2], True)], [([0], True), ([], True), ([1, 2], False), ([], False)]):
        value, gradient, metrics = run(loss, model, [batch(*c, margin) for c in cut])
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted)


def test_fillers_alone_have_no_loss() -> None:
    value, gradient, metrics = run(RewardLoss(0.1), Scores(), [batch([], True, False)])
    assert value == 0 and gradient.abs().max() == 0 and metrics.keys() == {"min_reward", "max_reward"}


def test_it_asks_for_the_head_alone() -> None:
    assert RewardLoss().needs.head == "score" and not RewardLoss().needs.fields
