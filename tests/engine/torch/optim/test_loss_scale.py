"""The dynamic loss scale against Megatron-Core's and torch's scalers, and whole steps of DDP and FSDP2 in float16
against plain torch on one process.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale, make_loss_scale
from tests.engine.torch.strategies.test_zero import CLIP, assert_float16_steps
from tests.engine.torch.zero_model import Plain
from tests.parity.pool import Pool

RANKS = "tests.engine.torch.zero_ranks:train"


def overflows(seed: int, many: float) -> list[bool]:
    draw = random.Random(seed)
    return [draw.random() < many for _ in range(200)]


@pytest.mark.parametrize("many", [0.05, 0.4, 1.0])
@pytest.mark.parametrize(("window", "hysteresis"), [(2, 1), (3, 2), (5, 4)])
def test_it_is_megatron_s(megatron: ModuleType, window: int, hysteresis: int, many: float) -> None:
    """Scale and counters after every step, which are also what a checkpoint keeps."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    real = torch.tensor
    with patch.object(torch, "tensor", lambda *args, device=None, **named: real(*args, **named)):
        theirs = DynamicGradScaler(2.0**10, 4.0, 2.0, 0.5, window, hysteresis)
    own = DynamicLossScale(
        OptimConfig(initial_loss_scale=2.0**10, min_loss_scale=4.0, loss_scale_window=window, hysteresis=hysteresis)
    )
    for overflow in overflows(window, many):
        theirs.update(overflow)
        own.update(overflow)
        assert own.state_dict() == {k: float(v) for k, v in theirs.state_dict().items()}
        assert own.can_fall == (float(theirs.scale) > 4.0)
        again = DynamicLossScale(OptimConfig())
        again.load_state_dict(own.state_dict())
        assert again.state_dict() == own.state_dict()


def test_with_hysteresis_1_it_is_torch_s() -> None:
    """GradScaler over real steps: the same are taken, with the same scale and unscaled gradients."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer, theirs = (
        torch.optim.SGD([weight], 1.0),
        torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3),
    )
    own, moved = DynamicLossScale(OptimConfig(initial_loss_scale=2.0**8, loss_scale_window=3, hysteresis=1)), 0.0
    for overflow in overflows(7, 0.1):
        theirs.scale((weight * (torch.inf if overflow else 0.125)).sum()).backward()
        unscaled = torch.full((3,), own.value * (torch.inf if overflow else 0.125))
        own.unscale([unscaled])
        moved -= 0.0 if overflow else float(unscaled[0])
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        own.update(overflow)
        assert (own.value, moved) == (theirs.get_scale(), float(weight.detach()[0]))


def test_only_float16_has_one() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    assert [make_loss_scale(kind, OptimConfig()) is not None for kind in kinds] == [False, False, True]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_steps_of_two_ranks(pool: Pool, kind: str) -> None:
    """Two micro-batches a step; steps on which the scale grows and falls, and a skipped one that changes nothing else.
    Window 2, hysteresis 1, start 2^10."""
    precision = "autocast float16" if kind == "ddp" else "float16"
    norms, gradients, module = Plain(5, 2, 2, CLIP, broken=(3,), precision=precision, scale=2.0**10).run()
    job: dict[str, Any] = {"kind": kind, "steps": 5, "micro": 2, "clip": CLIP, "dtype": "float16"}
    found = pool.run(RANKS, {**job, "broken": (3,), "states": True}, 2, timeout=240)
    assert_float16_steps(found, norms, gradients, module)
