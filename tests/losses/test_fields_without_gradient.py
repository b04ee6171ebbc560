"""What each loss wants a backward pass for: fields that it only reports have none, which saves passes over all logits.

Covers: megaswift/losses/contract.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.losses.cpo import CPO
from megaswift.losses.dpo import DPO
from megaswift.losses.kto import KTO
from megaswift.losses.orpo import ORPO
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.sft import CrossEntropy


@pytest.mark.parametrize(
    ("loss", "reported"),
    [
        (CrossEntropy(), {"correct"}),
        (DPO(), {"correct", "entropy", "mean_logit"}),
        (DPO(use_weighting=True), {"correct", "entropy", "mean_logit", "log_sum_sq"}),
        (KTO(), {"entropy", "mean_logit"}),
        (CPO(), {"mean_logit"}),
        (ORPO(), {"mean_logit"}),
        (PolicyLoss(), {"entropy"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_log_probabilities_alone_have_a_gradient(loss: Any, reported: set[str]) -> None:
    assert loss.needs.fields == reported | {"logprobs"}
    assert loss.needs.differentiable == ("logprobs",)


def test_terms_of_the_loss_have_one() -> None:
    assert PolicyLoss(entropy_coef=0.1).needs.differentiable == ("logprobs", "entropy")
    smoothed = CrossEntropy(label_smoothing=0.1).needs.differentiable
    assert set(smoothed) == {"logprobs", "logsumexp", "mean_logit"}
