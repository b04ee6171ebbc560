"""A loss of the user's that fails or returns something else is one message with its place; a right one is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.errors import PluginError
from megaswift.losses.user_loss import checked_formula


def made(formula: Callable[..., Any]) -> Callable[..., Tensor]:
    return checked_formula("mine", formula, lambda x: x, "pair")


def test_a_right_one_is_handed_on() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    made(lambda x: 3 * x)(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        (lambda x: x.sum(), r"returned a tensor of shape \[\]"),
        (lambda x: x[:1], r"returned a tensor of shape \[1\]"),
        (lambda x: 0.5, "returned float, not a tensor"),
        (lambda x: None, "returned NoneType, not a tensor"),
        (lambda x: x.nosuch, "failed\n(.|\n)*test_user_loss.py(.|\n)*AttributeError"),
        (lambda x: exit(3), "failed\n(.|\n)*SystemExit"),
    ],
)
def test_a_wrong_one_is_one_message(formula: Callable[..., Any], told: str) -> None:
    with pytest.raises(PluginError, match=rf"--loss_type mine: the loss of .*test_user_loss.py:\d+ {told}") as caught:
        made(formula)(torch.ones(2))
    assert caught.value.exit_code == 2
    if "returned" in told:
        assert caught.value.problems[0].fix == "return a loss for each pair, a tensor of shape [2]"
