"""The picture of the README: how far each layout's gradients are from Hugging Face's, and the limit of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.parity.compare import GRADIENT, Difference

BLUE = "#1f5fb4"
RED = "#c0392b"
INK = "#333a45"
GRID = "#e3e6ea"


def worst_gradient(differences: Sequence[Difference]) -> float:
    """The largest error among gradients, relative to each tensor's largest value."""
    return max(d.error for d in differences if d.name.startswith("gradient "))


def draw(errors: Mapping[str, float], picture: Path, parameters: int) -> None:
    """A dot for each layout on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    names = list(errors)
    figure = Figure(figsize=(10, 0.21 * len(names) + 1.6), dpi=130, layout="constrained")
    axis = figure.subplots()
    rows = range(len(names), 0, -1)
    axis.plot(list(errors.values()), rows, "o", color=BLUE, markersize=5)
    axis.axvline(GRADIENT, color=RED, linewidth=1.2)
    axis.text(GRADIENT * 1.08, len(names) + 0.6, "limit of the tests", color=RED, fontsize=8, va="bottom")
    axis.set_xscale("log")
    axis.set_xlim(1e-7, 2e-5)
    axis.set_ylim(0.3, len(names) + 1.6)
    axis.set_yticks(rows, names, fontsize=7, family="monospace")
    axis.set_xlabel("largest error of a gradient, relative to the largest value of its tensor", fontsize=8, color=INK)
    axis.set_title(
        f"{len(names)} layouts against Hugging Face on one process: every one of {parameters} gradients",
        loc="left",
        fontsize=10,
        color=INK,
    )
    axis.grid(axis="x", color=GRID, linewidth=0.7)
    axis.tick_params(colors=INK, length=0, labelsize=7)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(picture)
