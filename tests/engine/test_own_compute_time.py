"""What the clock of own passes counts: a module's passes, not what is between them or without gradients."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from megaswift.engine.own_compute_time import OwnComputeClock


class Sleeps(torch.autograd.Function):
    """The identity, 0.2 s each way."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        time.sleep(0.2)
        return values * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        time.sleep(0.2)
        return gradient


class Slow(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return Sleeps.apply(values)


@pytest.mark.wide
@pytest.mark.parametrize(("backward", "seconds"), [(True, 0.4), (False, 0.2)])
def test_own_passes(backward: bool, seconds: float) -> None:
    module = Slow()
    clock = OwnComputeClock([module], backward)
    values = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        module(values)
    assert clock.take() == 0
    output = module(values)
    time.sleep(0.5)
    output.sum().backward()
    assert seconds <= clock.take() < seconds + 0.5, "the pause between the passes is no part of it"
    assert clock.take() == 0
