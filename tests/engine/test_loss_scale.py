"""float16's loss scale, with Megatron-Core's own scaler: how a run begins, and when skipped steps end it.

Covers: megaswift/engine/megatron/optim/optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.engine.megatron.optim import optimizer as optim
from megaswift.engine.protocol import StepResult
from megaswift.trainers.hooks.step_monitor import (
    MOST_IN_A_ROW,
    SkippedStepAndLossSpikeMonitor,
    TrainingDiverged,
)


class Numbers:
    """A step's numbers on one rank."""

    def reduce(self, more: Sequence[torch.Tensor] = (), groups: Sequence[Any] = ()) -> list[torch.Tensor]:
        return list(more)

    def start_read(self, more: Sequence[torch.Tensor] = ()) -> Callable[[], list[float]]:
        return lambda: [float(t) for t in more]


ALONE = Numbers()


def scaler(megatron: ModuleType) -> Any:
    """The scaler of a run in float16, with the options that our engine gives Megatron-Core."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    seen: list[OptimizerConfig] = []
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False, use_distributed_optimizer=True))
    config = SimpleNamespace(bf16=False, fp16=True, params_dtype=torch.float16, fp8_param=False)
    stop = patch.object(optim, "get_megatron_optimizer", lambda options, chunks, **_: seen.append(options) or 1 / 0)
    with stop, pytest.raises(ZeroDivisionError):
        optim.build_optimizer([chunk], config, SwiftConfig(task="sft", model="m").optim)  # type: ignore[list-item, arg-type]
    o, real = seen[0], torch.tensor
    with patch.object(torch, "tensor", lambda *args, device=None, **named: real(*args, **named)):
        return DynamicGradScaler(o.initial_loss_scale, o.min_loss_scale, 2.0, 0.5, o.loss_scale_window, o.hysteresis)


def parts_of(megatron: ModuleType) -> tuple[Any, list[torch.Tensor]]:
    """Megatron-Core's chained optimizer over a dense and an expert weight, each part with its own real scaler."""
    import megatron.core.optimizer.optimizer as core

    class Part(core.MixedPrecisionOptimizer):
        """The parent's unscaling, check and update on one weight; the step itself is plain SGD."""

        def __init__(self) -> None:
            self.weight, self.grad_scaler, self.is_stub_optimizer = torch.zeros(3), scaler(megatron), False
            self.config = SimpleNamespace(
                timers=None,
                overlap_param_gather_with_optimizer_step=False,
                fp8_param=False,
                reuse_grad_buf_for_mxfp8_param_ag=False,
            )
            self.found_inf, self.grad = torch.zeros(1), torch.zeros(3)

        optimizer, param_groups = None, []

        def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
            return [self.grad]

        def _copy_model_grads_to_main_grads(self) -> None: ...

        def get_grad_stats_parallel_group(self) -> None: ...

        def step_with_ready_grads(self) -> bool:
            self.weight -= self.grad
            return True

        _copy_main_params_to_model_params = _copy_model_params_to_main_params = zero_grad = None
        state_dict = load_state_dict = reload_model_params = sharded_state_dict = None

    setattr(Part, optim.NORM_GRADIENTS, lambda part: [part.grad])
    Part.__abstractmethods__ = frozenset()
    parts = [Part(), Part()]
    chained = object.__new__(core.ChainedOptimizer)
    chained.chained_optimizers, chained.config = parts, parts[0].config
    return chained, [part.weight for part in parts]


@pytest.mark.parametrize("bad", [0, 1])
def test_dense_and_expert_gradients_are_unscaled_by_the_scale_of_the_loss(megatron: ModuleType, bad: int) -> None:
    """Only one part's gradients overflow; afterwards both parts' true gradients (1) are what the step takes."""
    chained, weights = parts_of(megatron)
    optim.share_loss_scaler(chained)
    taken = []
    for number in range(5):
        for index, part in enumerate(chained.chained_optimizers):
            part.grad = torch.ones(3) * float(chained.get_loss_scale())
            if number in (1, 2) and index == bad:
                part.grad[0] = torch.inf
        taken.append(optim.optimizer_step(chained, 0.0, torch.device("cpu"), ALONE))
    assert [stepped for _, stepped in taken] == [True, False, False, True, True]
    assert [norm == pytest.approx(6**0.5) if stepped else norm != norm for norm, stepped in taken] == [True] * 5
    scales = [part.grad_scaler for part in chained.chained_optimizers]
    assert [float(s.scale) for s in scales] == [2**15, 2**15], "the second of two overflows lowers it (hysteresis 2)"
    assert optim.get_loss_scale(chained) == 2**15
    assert [s.state_dict()["growth_tracker"] for s in scales] == [2, 2], "one update a step"
    assert all(torch.equal(w, torch.full((3,), -3.0)) for w in weights)


@pytest.mark.parametrize("added", [math.nan, math.inf])
def test_a_rank_that_trains_nothing_takes_part_in_the_decision(megatron: ModuleType, added: float) -> None:
    """Its optimizers are empty, and the other ranks wait for it: their overflow is in the sums, and lowers its scale
    too. A norm that is too large for float32 does not."""
    chained, _ = parts_of(megatron)
    optim.share_loss_scaler(chained)
    for part in chained.chained_optimizers:
        part.is_stub_optimizer = True
        setattr(part, optim.NORM_GRADIENTS, lambda: [])
    of_others = Numbers()
    of_others.reduce = lambda more, groups: [square + added for square in more]  # type: ignore[method-assign]
    for _ in range(2):
        norm, taken = optim.optimizer_step(chained, 1.0, torch.device("cpu"), of_others)
        assert not taken and (norm == added or norm != norm)
    assert optim.get_loss_scale(chained) == (2**15 if added != added else 2**16)


def test_an_overflow_counts_where_the_norm_leaves_the_gradient_out(megatron: ModuleType) -> None:
    """Of a replica that another rank counts; and the step of every part is skipped."""
    chained, weights = parts_of(megatron)
    optim.share_loss_scaler(chained)
    first, second = chained.chained_optimizers
    first.grad, second.grad = torch.tensor([1.0, torch.nan, 1.0]), torch.ones(3)
    setattr(first, optim.NORM_GRADIENTS, lambda: [])
    norm, taken = optim.optimizer_step(chained, 0.0, torch.device("cpu"), ALONE)
    assert norm != norm and not taken and not any(w.any() for w in weights)


def test_the_scale_of_a_checkpoint_is_the_one_that_is_read(megatron: ModuleType) -> None:
    shared = optim.SharedLossScaler(scaler(megatron))
    saved = shared.state_dict() | {"scale": torch.tensor([4.0]), "hysteresis_tracker": 1}
    with patch.object(torch.Tensor, "cuda", lambda self, *_: self), patch.object(torch.cuda, "current_device"):
        shared.load_state_dict(saved)
    shared.update(True)
    whole: Any = SimpleNamespace(grad_scaler=shared)
    assert optim.get_loss_scale(whole) == float(shared.scale) == 2.0 and optim.can_lower_loss_scale(whole)


def run(made: optim.SharedLossScaler, fits: float, steps: int) -> tuple[SkippedStepAndLossSpikeMonitor, list[int]]:
    """Steps of which those with a loss scale above `fits` overflow; which were skipped."""
    watch, skipped = SkippedStepAndLossSpikeMonitor(), []
    whole = SimpleNamespace(grad_scaler=made)
    for number in range(1, steps + 1):
        overflow = float(made.scale) > fits
        made.update(overflow)
        falling = overflow and optim.can_lower_loss_scale(whole)  # type: ignore[arg-type]
        skipped += [number] * overflow
        result = StepResult(1.0, skipped=overflow, loss_scale_falling=falling)
        watch.on_step(None, SimpleNamespace(number=number, result=result))  # type: ignore[arg-type]
    return watch, skipped


def test_a_run_that_needs_a_small_scale_goes_on(megatron: ModuleType) -> None:
    made = optim.SharedLossScaler(scaler(megatron))
    assert float(made.scale) == 2**16
    watch, skipped = run(made, 2.0**3, 40)
    assert skipped == list(range(1, 15)) and float(made.scale) == 2**3 and watch.in_a_row == 0


def test_gradients_that_no_scale_makes_finite_end_the_run(megatron: ModuleType) -> None:
    made = optim.SharedLossScaler(scaler(megatron))
    with pytest.raises(TrainingDiverged, match=f"{MOST_IN_A_ROW} steps in a row"):
        run(made, 0.0, 100)
    assert float(made.scale) == 1.0


def test_without_a_scaler_every_skipped_step_counts() -> None:
    bare = SimpleNamespace(grad_scaler=None)
    assert not optim.can_lower_loss_scale(bare)  # type: ignore[arg-type]
