"""What the clock of own passes counts: a module's passes, not what is between them or without gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megaswift.engine.diagnostics import compute_time
from megaswift.engine.diagnostics.compute_time import OwnComputeClock

NOW = [0.0]
"""The time, which nothing else in these tests takes."""


def pass_time(seconds: float) -> None:
    NOW[0] += seconds


class Sleeps(torch.autograd.Function):
    """The identity, 0.2 s each way."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        pass_time(0.2)
        return values * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        pass_time(0.2)
        return gradient


class Slow(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return Sleeps.apply(values)


@pytest.mark.parametrize(("backward", "seconds"), [(True, 0.4), (False, 0.2)])
def test_own_passes(backward: bool, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_time, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))
    module = Slow()
    clock = OwnComputeClock([module], backward)
    values = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        module(values)
    assert clock.take() == 0
    output = module(values)
    pass_time(0.5)
    output.sum().backward()
    assert clock.take() == pytest.approx(seconds), "the pause between the passes is no part of it"
    assert clock.take() == 0
