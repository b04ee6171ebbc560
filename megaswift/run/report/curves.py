"""The curves of report.html: which metrics are drawn, in which order, and their numbers.

Owns the choice and the reduction of long runs. Axes, scales and smoothing belong to `page.js`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megaswift.run.report.loss_png import metric_column, primary_metric
from megaswift.trainers.hooks.progress import PREDICTION_LOSS

Line = Mapping[str, Any]
Lines = Sequence[Line]

MOST_POINTS = 1000
"""Points of a curve on the page; longer runs are reduced to this many stretches."""
DIGITS = 6

PREFERENCE = {
    "token_accuracy": "share of label tokens predicted",
    "rewards/accuracies": "share of pairs ranked correctly",
    "accuracy": "share of pairs ranked correctly",
    "rewards/margins": "reward margin: chosen minus rejected",
    "margin": "score margin: chosen minus rejected",
    "rewards/chosen": "reward of chosen completions",
    "rewards/rejected": "reward of rejected completions",
}
POLICY = {
    "reward_std": "standard deviation of rewards",
    "completions/mean_length": "tokens per completion",
    "completions/clipped_ratio": "share of truncated completions",
    "entropy": "entropy",
    "clip_ratio/region_mean": "share of clipped tokens",
    "sampling/sampling_logp_difference/mean": "mismatch between sampler and trainer",
}
COURSE = {
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
    "memory_gib": "peak memory, GiB",
}
NOT_DRAWN = {
    "step",
    "epoch",
    "tokens",
    "label_tokens",
    "rank_step_time_slowest",
    # Each says what tokens_per_second shows.
    "step_time",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
}
SINGLE_REWARD = re.compile(r"rewards/(.+)/mean")


def chart_titles(runs: Sequence[Lines]) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the curves of a page.

    Args:
        runs: The lines of metrics.jsonl of each run.

    Returns:
        Metric to title, in the order of the page: the usual ones, and further metrics that change. A metric whose
        numbers are those of another one is left out.
    """
    names = dict.fromkeys(name for lines in runs for line in lines for name in line)
    watched = dict.fromkeys(primary_metric(lines) for lines in runs if lines)
    rewards = {name: f"reward {match[1]}, mean" for name in names if (match := SINGLE_REWARD.fullmatch(name))}
    if len(rewards) == 1 and "reward" in watched:
        rewards = {}  # the reward itself
    ahead = {name: f"loss of prediction layer {m[1]}" for name in names if (m := PREDICTION_LOSS.fullmatch(name))}
    wanted = {
        **{name: name for name in watched},
        "kl": "divergence from the reference (KL)",
        **rewards,
        **ahead,
        **PREFERENCE,
        **POLICY,
        **COURSE,
    }
    usual = {name: title for name, title in wanted.items() if name in names}
    seen = {_numbers(runs, name) for name in usual}
    further = {}
    for name in sorted(names.keys() - usual.keys() - NOT_DRAWN):
        numbers = _numbers(runs, name)
        if numbers not in seen and _changes(numbers):
            seen.add(numbers)
            further[name] = name
    return usual, further


def run_curves(lines: Lines, evals: Lines, names: Iterable[str]) -> dict[str, Any]:
    """Return the numbers of a run's curves: `x` by step, tokens and seconds of training, `curves` by metric, and the
    same of the evaluations under `evals`. `lines_per_point` is 1 unless the run is long.

    A run of more than MOST_POINTS lines is cut into stretches, of which the page gets the mean, the lowest and the
    highest number, so that no spike is lost.
    """
    size = math.ceil(len(lines) / MOST_POINTS) or 1
    ends = [min(start + size, len(lines)) - 1 for start in range(0, len(lines), size)]
    axes = _axes(lines)
    curves = {}
    for name in names:
        values = metric_column(lines, name)
        if any(map(math.isfinite, values)):
            curves[name] = _stretches(values, size)
    return {
        "lines_per_point": size,
        "x": {axis: [_short(values[end]) for end in ends] for axis, values in axes.items()},
        "curves": curves,
        "evals": _evaluations(evals, axes, curves),
    }


def _numbers(runs: Sequence[Lines], name: str) -> tuple[float | None, ...]:
    """All numbers of a metric, comparable: None where there is none."""
    columns = (metric_column(lines, name) for lines in runs)
    return tuple(value if math.isfinite(value) else None for column in columns for value in column)


def _changes(numbers: Iterable[float | None]) -> bool:
    return len({number for number in numbers if number is not None}) > 1


def _axes(lines: Lines) -> dict[str, list[float]]:
    """The horizontal position of each line: its step, tokens so far, seconds of training so far."""
    steps = metric_column(lines, "step")
    lengths = [step - before for before, step in itertools.pairwise([0.0, *steps])]
    seconds = [_finite(t) * n for t, n in zip(metric_column(lines, "step_time"), lengths, strict=True)]
    tokens = map(_finite, metric_column(lines, "tokens"))
    return {
        "step": steps,
        "tokens": [*itertools.accumulate(tokens)],
        "time": [*itertools.accumulate(seconds)],
    }


def _evaluations(evals: Lines, axes: Mapping[str, list[float]], names: Iterable[str]) -> dict[str, Any]:
    """Evaluations, each at the place of the last line up to its step."""
    steps = metric_column(evals, "step")
    at = [max(bisect.bisect_right(axes["step"], step) - 1, 0) for step in steps]
    x = {axis: [_short(values[i]) for i in at] for axis, values in axes.items() if values} | {"step": steps}
    curves = {name: [*map(_short, metric_column(evals, name))] for name in names if any(name in e for e in evals)}
    return {"x": x, "curves": curves}


def _stretches(values: Sequence[float], size: int) -> dict[str, list[float | None]]:
    if size == 1:
        return {"mean": [*map(_short, values)]}
    parts = [[v for v in values[i : i + size] if math.isfinite(v)] for i in range(0, len(values), size)]
    return {
        "mean": [_short(math.fsum(part) / len(part)) if part else None for part in parts],
        "low": [_short(min(part)) if part else None for part in parts],
        "high": [_short(max(part)) if part else None for part in parts],
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _short(value: float) -> float | None:
    """The number in as many digits as a picture needs; None where it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
