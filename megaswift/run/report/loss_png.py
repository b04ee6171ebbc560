"""loss.png: loss, learning rate and gradient norm of a run, from its metrics files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import atomic_file
from megaswift.trainers.hooks.metrics import read_lines

RAW = "#9ec5f4"
MEAN = "#1f5fb4"
EVAL = "#d9730d"
BAD = "#c0392b"
INK = "#333a45"
GRID = "#e3e6ea"
LOG_FACTOR = 20


def median_smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the median of the `window` values around each, so that a spike stays a spike; as many on either side,
    hence fewer at the ends.

    NaN leaves a gap and counts nowhere.
    """
    out = []
    for i, value in enumerate(values):
        half = min(window // 2, i, len(values) - 1 - i)
        near = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
        out.append(statistics.median(near) if math.isfinite(value) else math.nan)
    return out


def metric_column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return one field of all lines, NaN where it is null or missing."""
    return [float(v) if isinstance(v := line.get(name), (int, float)) else math.nan for line in lines]


def smoothing_window(count: int) -> int:
    """Return the number of points in the median: about a thirtieth of the curve, 1 (none) for short ones; odd, as many
    on either side of each."""
    return max(1, count // 30) | 1


def plot_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the range to show: all of a tame curve, without the first spikes of a wild one. It reaches below 0 only
    where a value does; None when there is nothing."""
    finite = sorted(v for v in values if math.isfinite(v))
    if not finite:
        return None
    low = finite[0]
    high = finite[-1]
    typical = finite[min(int(len(finite) * 0.98), len(finite) - 1)]
    if len(finite) >= 50 and high - low > 4 * (typical - low) > 0:
        high = typical + 0.5 * (typical - low)
    room = 0.06 * (high - low) or abs(high) * 0.05 or 1.0  # a constant: around it
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def is_log_scale(values: Sequence[float]) -> bool:
    """Return whether a loss or norm needs a logarithmic axis: its values span a factor of 20, so that the smallest
    could not be read off a linear one."""
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > LOG_FACTOR * min(finite)


def set_log_scale(axis: Any, values: Sequence[float]) -> None:
    """Make a vertical axis logarithmic, with enough ticks to read values between powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_yscale("log")
    finite = [v for v in values if math.isfinite(v)]
    decades = math.log10(max(finite) / min(finite))
    if decades < 2.5:
        between: tuple[int, ...] = (1, 2, 5)
    else:
        between = (1, 3) if decades < 5 else (1,)
    axis.yaxis.set_major_locator(LogLocator(subs=between))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()


def draw_loss_png(metrics: Path, evaluation: Path, picture: Path, title: str) -> None:
    """Draws the picture, whole or not at all; nothing without a line of metrics."""
    lines = read_lines(metrics)
    evals = read_lines(evaluation)
    if not lines:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 6.4), dpi=150, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3.2, 1, 1]})
    steps = metric_column(lines, "step")
    watched = primary_metric(lines)
    _main(axes[0], steps, lines, evals)
    axes[0].set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=10)
    few = {"marker": "o", "markersize": 3} if len(lines) < 40 else {}
    axes[1].plot(steps, metric_column(lines, "learning_rate"), color=MEAN, linewidth=1.4, **few)
    axes[2].plot(steps, metric_column(lines, "grad_norm"), color=MEAN, linewidth=1.1, **few)
    norms = metric_column(lines, "grad_norm")
    if is_log_scale(norms):
        set_log_scale(axes[2], norms)
    elif bounds := plot_limits(norms):
        axes[2].set_ylim(*bounds)
    axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    for axis, name in zip(axes, (watched, "learning rate", "gradient norm"), strict=True):
        axis.set_ylabel(name, color=INK, fontsize=9)
        axis.grid(color=GRID, linewidth=0.7)
        axis.tick_params(colors=INK, labelsize=8, length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(GRID)
    axes[2].set_xlabel("optimizer step", color=INK, fontsize=9)
    axes[2].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    figure.align_ylabels(axes)
    with atomic_file(picture) as fresh:
        figure.savefig(fresh, format="png")


def primary_metric(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric to plot: the reward where there is one, because a policy's loss shows nothing, else the
    loss."""
    return "reward" if any("reward" in line for line in lines) else "loss"


def _main(axis: Any, steps: Sequence[float], lines: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
    watched = primary_metric(lines)
    losses = metric_column(lines, watched)
    window = smoothing_window(len(lines))
    # Training: one curve, or the median over a window on top of each line.
    if window > 1:
        axis.plot(steps, losses, color=RAW, linewidth=0.9, label="training")
        axis.plot(steps, median_smooth(losses, window), color=MEAN, linewidth=1.8, label=f"median of {window} lines")
    else:
        axis.plot(
            steps,
            losses,
            color=MEAN,
            linewidth=1.6,
            marker="o" if len(lines) < 40 else None,
            markersize=3,
            label="training",
        )
    # Evaluations, and a mark at each skipped step.
    shown = list(losses)
    if evals:
        values = metric_column(evals, watched)
        shown += values
        axis.plot(
            metric_column(evals, "step"),
            values,
            color=EVAL,
            linewidth=1.2,
            marker="D",
            markersize=4,
            label="evaluation",
        )
    bad = [line["step"] for line in lines if line.get("skipped")]
    for i, step in enumerate(bad):
        axis.axvline(step, color=BAD, linewidth=0.8, alpha=0.5, label="skipped" if i == 0 else None)
    # Limits, legend, and the last value.
    if watched == "loss" and is_log_scale(shown):
        set_log_scale(axis, shown)
    elif bounds := plot_limits(shown):
        axis.set_ylim(*bounds)
    if evals or window > 1 or bad:
        axis.legend(
            frameon=False, fontsize=8, labelcolor=INK, loc="upper right" if watched == "loss" else "lower right"
        )
    last = next(((s, v) for s, v in zip(reversed(steps), reversed(losses), strict=True) if math.isfinite(v)), None)
    if last is not None:
        axis.annotate(
            f"{last[1]:.4g}", last, xytext=(6, 0), textcoords="offset points", fontsize=8, color=INK, va="center"
        )
    axis.margins(x=0.045)
