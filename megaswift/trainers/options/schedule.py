"""Section `schedule`: the course of the learning rate and of the weight decay over the run. The formulas are in
`megaswift.trainers.schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megaswift.engine.options.optimizer import NO_CRITIC
from megaswift.options.option import but_not, is_set, option
from megaswift.options.tasks import DATASETS, LANGUAGE

PLATEAU = "reduce_lr_on_plateau"
SCHEDULES = {
    "constant_with_warmup": "constant",
    "inverse-square-root": "inverse_sqrt",
    "inverse_square_root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule"""

    warmup_fits_run: ClassVar[bool] = False
    """Whether the warmup is a default, which a short run shortens."""

    min_lr: float = option(
        0.0,
        "Final learning rate of the schedule (inverse_sqrt: lower bound)",
        minimum=0,
        only_with={"lr_scheduler_type": but_not("constant")},
    )
    min_lr_ratio: float | None = option(
        None,
        "Final learning rate as a fraction of learning_rate, instead of min_lr",
        aliases=("min_lr_rate",),
        minimum=0,
        maximum=1,
        only_with={"lr_scheduler_type": but_not("constant")},
    )
    lr_scheduler_type: str = option(
        "cosine",
        "Learning-rate schedule after warmup",
        aliases=("lr_decay_style",),
        choices=(
            "constant",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_warmup_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "wsd",
            PLATEAU,
        ),
        spellings=SCHEDULES,
        common=DATASETS,
    )
    warmup_ratio: float = option(
        0.0,
        "Fraction of steps used for warmup",
        aliases=("lr_warmup_fraction",),
        minimum=0,
        below=1,
        common=DATASETS,
    )
    warmup_steps: int = option(
        0,
        "Warmup steps, instead of warmup_ratio; default with random_init: 500",
        aliases=("lr_warmup_iters",),
        minimum=0,
        unit="steps",
    )
    lr_warmup_init: float = option(
        0.0, "Learning rate at the first warmup step", minimum=0, only_with={"warmup": is_set(notice=True)}
    )
    lr_warmup_init_ratio: float | None = option(
        None,
        "lr_warmup_init as a fraction of learning_rate",
        aliases=("warmup_lr_rate",),
        minimum=0,
        maximum=1,
        only_with={"warmup": is_set(notice=True)},
    )
    lr_decay_iters: int | None = option(
        None,
        "Steps until the schedule reaches its final rate; default: all steps",
        minimum=1,
        unit="steps",
        only_with={"decay_steps": True},
    )
    lr_num_cycles: int = option(
        1, "Cycles of cosine_with_restarts", minimum=1, only_with={"lr_scheduler_type": "cosine_with_restarts"}
    )
    lr_power: float = option(
        1.0, "Exponent of the polynomial schedule", above=0, only_with={"lr_scheduler_type": "polynomial"}
    )
    wsd_decay_ratio: float = option(
        0.1, "Fraction of steps in the decay phase of wsd", above=0, maximum=1, only_with={"lr_scheduler_type": "wsd"}
    )
    wsd_decay_steps: int | None = option(
        None,
        "Steps in the decay phase of wsd, instead of wsd_decay_ratio",
        aliases=("lr_wsd_decay_iters", "num_decay_steps"),
        minimum=1,
        unit="steps",
        only_with={"lr_scheduler_type": "wsd"},
    )
    wsd_stable_steps: int | None = option(
        None,
        "Steps of wsd between warmup and decay; default: until the decay at the end",
        aliases=("num_stable_steps",),
        minimum=0,
        unit="steps",
        only_with={"lr_scheduler_type": "wsd"},
    )
    wsd_decay_style: str = option(
        "cosine",
        "Shape of the decay phase of wsd",
        aliases=("lr_wsd_decay_style",),
        choices=("cosine", "linear", "minus_sqrt", "exponential"),
        spellings={"1-sqrt": "minus_sqrt"},
        only_with={"lr_scheduler_type": "wsd"},
    )
    plateau_factor: float = option(
        0.1,
        "reduce_lr_on_plateau: factor of the learning rate",
        above=0,
        below=1,
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_patience: int = option(
        10,
        "reduce_lr_on_plateau: evaluations without improvement that are tolerated",
        minimum=0,
        unit="evaluations",
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_threshold: float = option(
        1e-4,
        "reduce_lr_on_plateau: change of the metric that counts as an improvement",
        minimum=0,
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_threshold_mode: str = option(
        "rel",
        "reduce_lr_on_plateau: threshold as a fraction of the best value, or absolute",
        choices=("rel", "abs"),
        only_with={"lr_scheduler_type": PLATEAU},
    )
    plateau_cooldown: int = option(
        0,
        "reduce_lr_on_plateau: evaluations after a reduction that do not count",
        minimum=0,
        unit="evaluations",
        only_with={"lr_scheduler_type": PLATEAU},
    )
    start_weight_decay: float | None = option(
        None,
        "Weight decay of the first step if weight_decay_incr_style is not constant",
        minimum=0,
        tasks=NO_CRITIC,
        only_with={"weight_decay_incr_style": but_not("constant")},
    )
    end_weight_decay: float | None = option(
        None,
        "Weight decay after the last step, with start_weight_decay",
        minimum=0,
        tasks=NO_CRITIC,
        only_with={"weight_decay_incr_style": but_not("constant")},
    )
    weight_decay_incr_style: str = option(
        "constant",
        "Course of the weight decay from start_weight_decay to end_weight_decay",
        choices=("constant", "linear", "cosine"),
        tasks=NO_CRITIC,
    )


class FromScratchSchedule(ScheduleConfig):
    """Learning-rate schedule"""

    warmup_fits_run = True


FROM_SCRATCH = {"learning_rate": 3e-4, "warmup_steps": 500}
"""Defaults of training random weights, as in configs/pt/from_scratch.yaml."""
LONGEST_WARMUP = 0.2
"""Share of the schedule that a default warmup takes at most."""


def from_scratch_defaults(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of options that depend on `random_init`: none of what is given, and no warmup where its
    length is given in the other way."""
    if task not in LANGUAGE or not given.get("random_init"):
        return {}
    fixed = {*given, *(("warmup_steps",) if "warmup_ratio" in given else ())}
    return {name: value for name, value in FROM_SCRATCH.items() if name not in fixed}
