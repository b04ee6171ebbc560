"""Line charts as inline SVG for report.html, without scripts or external assets.

Colors are CSS classes, so that the page's light and dark themes hold. Hover text comes from SVG's own `<title>`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Points = list[tuple[float, float]]
MOST_POINTS = 600
LEFT = 62
RIGHT = 14
TOP = 12
BOTTOM = 26


@dataclass(frozen=True)
class ChartSeries:
    """One line of a chart."""

    name: str
    points: Points
    style: str
    """CSS class: raw, mean, eval."""
    marks: bool = False


def thin_points(points: Points, most: int = MOST_POINTS) -> Points:
    """Reduce points to as many as can be drawn: the lowest and the highest of each stretch, so that no spike is
    lost."""
    points = [p for p in points if math.isfinite(p[1])]
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    thinned: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        thinned += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return sorted({points[0], *thinned, points[-1]})


def axis_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside the range."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def axis_label(value: float, digits: int | None = None) -> str:
    """Write a short label: 1.2k, 0.25, 3e-05; with that many significant digits, or as many as its size asks for."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= size < 1e13:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.{digits or 4}g}{unit}"
    if not digits:
        digits = next((n for n, least in ((4, 1), (3, 1e-3)) if size >= least), 2)
    return f"{value:.{digits}g}"


def axis_labels(values: Sequence[float]) -> list[str]:
    """Write the labels of one axis: no two alike, with more digits where the range is narrow beside its values."""
    short = [axis_label(value) for value in values]
    longer = ([axis_label(value, digits) for value in values] for digits in range(3, 16))
    return next((texts for texts in (short, *longer) if len(set(texts)) == len(values)), short)


def line_chart_svg(
    title: str, series: Sequence[ChartSeries], bounds: tuple[float, float], width: int = 560, height: int = 220
) -> str:
    """Draw an SVG of the series over the step, `bounds` on the vertical axis; points outside are cut at the frame."""
    steps = [x for s in series for x, _ in s.points]  # those without a finite value too: all charts have one range
    series = [ChartSeries(s.name, thin_points(s.points), s.style, s.marks) for s in series]
    if not any(s.points for s in series):
        return ""
    x0 = min(steps)
    x1 = max(steps)
    x0, x1 = (x0, x1) if x1 > x0 else (x0 - 1, x1 + 1)
    y0, y1 = bounds

    def place(x: float, y: float) -> tuple[float, float]:
        inside = min(max(y, y0), y1)
        return (
            LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT),
            height - BOTTOM - (inside - y0) / (y1 - y0) * (height - TOP - BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    values = axis_ticks(y0, y1, 4)
    for value, text in zip(values, axis_labels(values), strict=True):
        _, y = place(x0, value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
        )
    for value in axis_ticks(x0, x1, 6):
        if value == int(value):
            x, _ = place(value, y0)
            parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{axis_label(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>')
    for s in series:
        placed = [place(x, y) for x, y in s.points]
        parts.append(f'<polyline class="{s.style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>')
        if s.marks or len(placed) <= 40:
            parts += [f'<circle class="{s.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in placed]
        for (x, y), (step, value) in zip(placed, s.points, strict=True):
            text = f"<title>{escape(s.name)}, step {step:g}: {value:.6g}</title>"
            parts.append(f'<circle class="hover" cx="{x:.1f}" cy="{y:.1f}" r="7">{text}</circle>')
    return "".join([*parts, "</svg>"])
