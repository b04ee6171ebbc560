"""Defaults of training random weights: those of configs/pt/from_scratch.yaml, unless an option says otherwise.

Covers: megaswift/trainers/schedule.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.run.summary import optimizer_text
from megaswift.trainers.options.schedule import FROM_SCRATCH
from megaswift.trainers.schedule import check_schedule_length, lr_at, warmup_steps
from tests.sources import ROOT


def peak_and_warmup(steps: int, **options: Any) -> tuple[float, int]:
    cfg = SwiftConfig(**{"task": "pt", "random_init": True, **options})
    check_schedule_length(steps, cfg.schedule)
    return cfg.optim.learning_rate, warmup_steps(steps, cfg.schedule)


def test_they_are_those_of_the_example() -> None:
    example = yaml.safe_load((ROOT / "configs/pt/from_scratch.yaml").read_text())["optim"]
    assert {"learning_rate": float(example["lr"]), "warmup_steps": example["warmup_steps"]} == FROM_SCRATCH


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (20_000, {}, (3e-4, 500)),
        (20_000, {"task": "sft"}, (3e-4, 500)),
        (60, {}, (3e-4, 12)),  # a fifth
        (60, {"max_steps": 60}, (3e-4, 12)),
        (20_000, {"lr_decay_iters": 1000}, (3e-4, 200)),
        (3, {}, (3e-4, 0)),
        (60, {"random_init": False}, (1e-5, 0)),
        (60, {"lr": 1e-3}, (1e-3, 12)),
        (60, {"warmup_steps": 0}, (3e-4, 0)),
        (60, {"warmup_steps": 50}, (3e-4, 50)),
        (60, {"warmup_ratio": 0.5}, (3e-4, 30)),
        (60, {"warmup_ratio": 0.0}, (3e-4, 0)),
    ],
)
def test_what_was_typed_wins_and_a_short_run_warms_up_for_a_fifth(
    steps: int, options: dict[str, Any], expected: tuple[float, int]
) -> None:
    assert peak_and_warmup(steps, **options) == expected


def test_a_typed_warmup_is_not_shortened() -> None:
    with pytest.raises(ConfigError, match="is longer than the run of 60 steps"):
        peak_and_warmup(60, warmup_steps=500)
    with pytest.raises(ConfigError, match="is longer than the run of 60 steps"):
        peak_and_warmup(60, warmup_steps=500, max_steps=60)


def test_a_written_configuration_repeats_the_run_at_any_length() -> None:
    """The shortened warmup is not written as if it had been typed."""
    cfg = SwiftConfig(task="pt", random_init=True)
    again = SwiftConfig(**cfg.to_dict())
    changed = cfg.replace(save_steps=5)
    for one in (cfg, again, changed):
        assert [warmup_steps(n, one.schedule) for n in (60, 5000)] == [12, 500]
        assert one.optim.learning_rate == 3e-4


def test_the_first_screen_shows_them() -> None:
    cfg = SwiftConfig(task="pt", random_init=True)
    assert optimizer_text(cfg.optim, cfg.schedule, 60).startswith("adam, learning rate 0.0003 cosine to 0, 12 warm-up")
    assert lr_at(12, 60, cfg.schedule, cfg.optim.learning_rate) == 3e-4
