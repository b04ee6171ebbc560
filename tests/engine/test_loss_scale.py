"""float16's loss scale, with Megatron-Core's own scaler: how a run begins, and when skipped steps end it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.engine.megatron import optimizer as optim
from megaswift.engine.protocol import StepResult
from megaswift.trainers.watch import MOST_IN_A_ROW, Diverged, Watch


def scaler(megatron: ModuleType) -> Any:
    """The scaler of a run in float16, with the options that our engine gives Megatron-Core."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    seen: list[OptimizerConfig] = []
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False))
    config = SimpleNamespace(bf16=False, fp16=True, params_dtype=torch.float16)
    stop = patch.object(optim, "get_megatron_optimizer", lambda options, chunks, **_: seen.append(options) or 1 / 0)
    with stop, pytest.raises(ZeroDivisionError):
        optim.build([chunk], config, SwiftConfig(task="sft", model="m"))  # type: ignore[list-item, arg-type]
    o, real = seen[0], torch.tensor
    with patch.object(torch, "tensor", lambda *args, device=None, **named: real(*args, **named)):
        return DynamicGradScaler(o.initial_loss_scale, o.min_loss_scale, 2.0, 0.5, o.loss_scale_window, o.hysteresis)


def run(made: Any, fits: float, steps: int) -> tuple[Watch, list[int]]:
    """Steps of which those with a loss scale above `fits` overflow; which were skipped."""
    watch, skipped = Watch(), []
    whole = SimpleNamespace(chained_optimizers=[])
    for number in range(1, steps + 1):
        overflow = float(made.scale) > fits
        made.update(overflow)
        with patch.object(optim, "parts", lambda _: [SimpleNamespace(grad_scaler=made)]):
            falling = overflow and optim.scale_can_fall(whole)  # type: ignore[arg-type]
        skipped += [number] * overflow
        result = StepResult(1.0, skipped=overflow, loss_scale_falling=falling)
        watch.on_step(None, SimpleNamespace(number=number, result=result))  # type: ignore[arg-type]
    return watch, skipped


def test_a_run_that_needs_a_small_scale_goes_on(megatron: ModuleType) -> None:
    made = scaler(megatron)
    assert float(made.scale) == 2**16
    watch, skipped = run(made, 2.0**3, 40)
    assert skipped == list(range(1, 15)) and float(made.scale) == 2**3 and watch.in_a_row == 0


def test_gradients_that_no_scale_makes_finite_end_the_run(megatron: ModuleType) -> None:
    made = scaler(megatron)
    with pytest.raises(Diverged, match=f"{MOST_IN_A_ROW} steps in a row"):
        run(made, 0.0, 100)
    assert float(made.scale) == 1.0


def test_without_a_scaler_every_skipped_step_counts() -> None:
    bare = SimpleNamespace(grad_scaler=None)
    with patch.object(optim, "parts", lambda _: [bare]):
        assert not optim.scale_can_fall(bare)  # type: ignore[arg-type]
