"""Learning rates that fall with evaluations: torch's ReduceLROnPlateau is the oracle, by the keys that transformers
passes to it."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megaswift.config import load_config
from megaswift.trainers.hook import Hook
from megaswift.trainers.hooks.plateau import ReduceOnPlateauHook, lowered_rate, plateau_hook
from megaswift.trainers.loop import train
from megaswift.trainers.options.evaluation_checks import best_model_metric
from tests.trainers.tiny import tiny_loop

WORDS = ["--lr_scheduler_type", "reduce_lr_on_plateau", "--lr", "3e-4", "--val_dataset", "v", "--eval_steps", "1"]


def hook_of(kwargs: dict[str, Any]) -> ReduceOnPlateauHook:
    """Of a run that names these keys as a user of transformers does."""
    cfg = load_config("sft", [*WORDS, "--lr_scheduler_kwargs", json.dumps(kwargs)], environ={})
    return plateau_hook(cfg.schedule, cfg.optim.learning_rate, best_model_metric(cfg), cfg.evaluation.greater_is_better)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"patience": 0, "factor": 0.5, "eps": 1e-8},
        {"patience": 2, "factor": 0.3, "min_lr": 1e-5, "cooldown": 2},
        {"patience": 1, "threshold": 0.05, "threshold_mode": "abs", "mode": "max"},
        {"patience": 1, "threshold": 0.1, "mode": "max"},
    ],
    ids=str,
)
def test_rates_are_torch_s(kwargs: dict[str, Any]) -> None:
    draw = random.Random(4)
    values = [draw.choice([math.nan, 2.0, draw.uniform(0.5, 2.5)]) for _ in range(60)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler, hook = ReduceLROnPlateau(optimizer, **kwargs), hook_of(kwargs)
    expected, got = [], []
    for number, value in enumerate(values):
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
        hook.take(value)
        got.append(hook.rate)
        if number == 25:  # a resumed run
            state = json.loads(json.dumps(hook.state_dict()))
            hook = hook_of(kwargs)
            hook.load_state_dict(state)
    assert got == pytest.approx(expected, rel=1e-12) and got[-1] < 3e-4


def test_a_run_trains_with_the_reduced_rate(tmp_path: Path) -> None:
    """From the step after the evaluation; the evaluation before the first step does not count."""

    class Evaluations(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            loop.emit("on_evaluate", {"step": step.number, "loss": 1.0})

    hook = hook_of({"patience": 0, "factor": 0.5})
    hook.on_evaluate(tiny_loop(1), {"step": 0, "loss": 0.1})
    loop = tiny_loop(4, Evaluations(), hook)
    loop.learning_rate = partial(lowered_rate, lambda step, total: 3e-4, hook)
    train(loop)
    assert loop.engine.rates == pytest.approx([3e-4, 3e-4, 1.5e-4, 0.75e-4])
