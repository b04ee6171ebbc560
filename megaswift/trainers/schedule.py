"""Learning-rate schedules: warmup, then constant, linear, polynomial, cosine with or without restarts, inverse square
root or warmup-stable-decay. Beside them, the course of the weight decay.

Owns the formulas, pure functions of the step's number. Steps count from 0 as in Hugging Face's schedulers: with n
warm-up steps, step 0 takes rate 0 and step n the full one. The engine is given the rate; it has no scheduler, hence no
state to save.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, pi, sqrt
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.log import count_text
from megaswift.trainers.options.schedule import LONGEST_WARMUP, PLATEAU, ScheduleConfig
from megaswift.trainers.options.training import TrainConfig


def warmup_steps(total_steps: int, schedule: ScheduleConfig) -> int:
    """Return the steps that warm up: `warmup_steps` when given, else that share of the schedule's steps, rounded up (as
    transformers does). A default takes at most a fifth of the schedule."""
    length = decay_steps(total_steps, schedule)
    if schedule.warmup_steps <= 0:
        return ceil(schedule.warmup_ratio * length)
    longest = int(LONGEST_WARMUP * length) if schedule.warmup_fits_run else schedule.warmup_steps
    return min(schedule.warmup_steps, longest)


def decay_steps(total_steps: int, schedule: ScheduleConfig) -> int:
    """Return the steps until the schedule has reached its final rate: `lr_decay_iters`, else all."""
    return schedule.lr_decay_iters or total_steps


def final_rate(schedule: ScheduleConfig, peak: float) -> float:
    """Return the rate at the end of the schedule."""
    return schedule.min_lr if schedule.min_lr_ratio is None else schedule.min_lr_ratio * peak


def first_warmup_rate(schedule: ScheduleConfig, peak: float) -> float:
    """Return the rate at the first step of the warmup."""
    ratio = schedule.lr_warmup_init_ratio
    return schedule.lr_warmup_init if ratio is None else ratio * peak


def check_schedule_length(total_steps: int, schedule: ScheduleConfig) -> None:
    """Raise ConfigError for a warm-up longer than the run, or a decay longer than the schedule."""
    if schedule.lr_scheduler_type == "wsd" and (schedule.wsd_decay_steps or 0) > decay_steps(total_steps, schedule):
        rule = f"is longer than the schedule of {count_text(decay_steps(total_steps, schedule), 'step')}"
        raise ConfigError(Problem(f"--wsd_decay_steps {schedule.wsd_decay_steps}", rule, "--wsd_decay_ratio 0.1"))
    if warmup_steps(total_steps, schedule) > total_steps:
        raise ConfigError(
            Problem(
                f"--warmup_steps {schedule.warmup_steps}",
                f"is longer than the run of {count_text(total_steps, 'step')}",
                "use --warmup_ratio 0.1, or a longer run (--max_steps, --num_train_epochs)",
            )
        )


def lr_at(step: int, total_steps: int, schedule: ScheduleConfig, peak: float) -> float:
    """Return the learning rate of step `step` (from 0) of `total_steps`; `peak`: the full rate."""
    low = final_rate(schedule, peak)
    warm = warmup_steps(total_steps, schedule)
    kind = schedule.lr_scheduler_type
    total_steps = decay_steps(total_steps, schedule)
    one = int(kind == "cosine_warmup_with_min_lr")  # its step 0 has the rate of the first step after 0
    if step < warm:
        first = first_warmup_rate(schedule, peak)
        share = step / max(1, warm - 1) if one and first else (step + one) / warm
        return first + (peak - first) * share
    if kind in ("constant", PLATEAU):
        return peak
    if kind == "inverse_sqrt":
        return low if step > total_steps else max(low, peak * inverse_sqrt(step, warm))
    start = warm
    end = total_steps
    if kind == "wsd":
        fall = schedule.wsd_decay_steps or ceil(schedule.wsd_decay_ratio * total_steps)
        start = max(warm, total_steps - fall) if schedule.wsd_stable_steps is None else warm + schedule.wsd_stable_steps
        end = total_steps if schedule.wsd_stable_steps is None else start + fall
    progress = min(1.0, max(0, step + one - start) / max(1, end - start))
    share = _remaining_share(kind, progress, schedule)
    return peak * share + low * (1 - share)


def inverse_sqrt(step: int, warm: int) -> float:
    """Return sqrt(t / (step + t - warm)) with the time scale t = warm-up steps, or 10,000 without (big_vision, as in
    transformers)."""
    scale = warm or 10_000
    return sqrt(scale / (step + scale - warm))


def linear_decay(progress: float) -> float:
    """Fall from 1 to 0 on a line."""
    return 1 - progress


def cosine_decay(progress: float) -> float:
    """Fall from 1 to 0 on half a cosine (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""
    return (1 + cos(pi * progress)) / 2


def _remaining_share(kind: str, progress: float, schedule: ScheduleConfig) -> float:
    """What is left of the rate above `min_lr`, at progress 0 to 1 of the falling part."""
    if kind == "cosine_with_restarts":
        return 0.0 if progress >= 1 else cosine_decay(schedule.lr_num_cycles * progress % 1.0)
    if kind == "polynomial":
        return float((1 - progress) ** schedule.lr_power)
    return SHAPES[schedule.wsd_decay_style if kind == "wsd" else kind](progress)


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": linear_decay,
    "cosine": cosine_decay,
    "cosine_warmup_with_min_lr": cosine_decay,
    "minus_sqrt": lambda progress: 1 - sqrt(progress),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1,
}
"""Course of a falling part, progress 0 to 1; the last two are Megatron-Core's decay styles of wsd (arXiv 2404.06395),
which stays at the full rate and falls over the last `wsd_decay_ratio` of all steps."""


def weight_decay_at(step: int, total_steps: int, schedule: ScheduleConfig) -> float | None:
    """Return the weight decay of step `step` (from 0), which rises over all steps (Megatron-LM's incr_style); None:
    always `weight_decay`."""
    if schedule.weight_decay_incr_style == "constant" or schedule.start_weight_decay is None:
        return None
    progress = min(1.0, step / max(1, total_steps))
    share = progress if schedule.weight_decay_incr_style == "linear" else 1 - cosine_decay(progress)
    return schedule.start_weight_decay + share * ((schedule.end_weight_decay or 0.0) - schedule.start_weight_decay)


def count_steps(train: TrainConfig, source: Any) -> int:
    """Return the optimizer steps of the run: `max_steps`, else what the epochs need, the last one rounded up."""
    if train.max_steps is not None:
        return train.max_steps
    if source.rows is None:
        raise ConfigError(
            Problem("--streaming", "a stream has no known length, so epochs cannot be counted", "--max_steps N")
        )
    return source.steps_for(train.num_train_epochs)
