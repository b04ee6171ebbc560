"""What `megaswift bench comm` shows: a table, a JSON file and a picture of bus bandwidth beside the links' figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import atomic_file, write_atomically
from megaswift.base.byte_size import bytes_text
from megaswift.engine.diagnostics.communication_benchmark import CommunicationTiming
from megaswift.parallel.layout import Layout
from megaswift.parallel.link_rates import bus_factor, hardware_figure
from megaswift.run.report.loss_png import GRID, INK
from megaswift.version import __version__

COLORS = {
    "all_reduce": "#1f5fb4",
    "all_gather": "#d9730d",
    "reduce_scatter": "#2e8b57",
    "all_to_all": "#8e44ad",
    "send_recv": "#c0392b",
}
GIGA = 1e9
COLUMNS = ("group", "ranks", "operation", "size", "time", "algbw GB/s", "busbw GB/s", "link GB/s", "of link")


@dataclass(frozen=True)
class GroupPlacement:
    """Where the ranks are, and what their links carry."""

    nodes: Sequence[str]
    """The node of each rank."""
    device: str
    in_node: float | None
    """GB/s of one rank's link within a node; None: not known."""
    between_nodes: float | None


@dataclass(frozen=True)
class BenchReport:
    """The figures of one benchmark."""

    layout: Layout
    backend: str
    placement: GroupPlacement
    groups: Mapping[str, Sequence[Sequence[int]]]
    timings: Sequence[CommunicationTiming]
    left_out: Sequence[tuple[int, str, str]]

    def rows(self) -> list[dict[str, Any]]:
        """One entry for each measurement; bandwidths in GB/s."""
        return [self._row(timing) for timing in self.timings]

    def _row(self, timing: CommunicationTiming) -> dict[str, Any]:
        ranks = timing.slowest_ranks
        bandwidth = timing.size / timing.seconds / GIGA
        bus = bandwidth * bus_factor(timing.operation, len(ranks))
        nodes = [self.placement.nodes[rank] for rank in ranks]
        link = hardware_figure(timing.operation, nodes, self.placement.in_node, self.placement.between_nodes)
        return {
            "group": timing.group,
            "operation": timing.operation,
            "size_bytes": timing.size,
            "repeats": timing.repeats,
            "seconds": timing.seconds,
            "algorithm_bandwidth": bandwidth,
            "bus_bandwidth": bus,
            "link_bandwidth": link,
            "slowest_ranks": list(ranks),
            "fastest_group_seconds": timing.fastest_seconds,
        }

    def table(self) -> str:
        """The figures as text, one block for each group and operation."""
        groups = list(self.groups)
        operations = list(COLORS)
        rows = sorted(self.rows(), key=lambda r: (groups.index(r["group"]), operations.index(r["operation"])))
        lines = [COLUMNS, *(self._cells(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        text = [
            "  ".join(cell.ljust(width) if i in (0, 2) else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        nodes = len(set(self.placement.nodes))
        head = (
            f"{self.layout.describe()} on {self.layout.world_size} ranks, {nodes} node{'s' if nodes > 1 else ''}, "
            f"{self.backend}, {self.placement.device}; the slowest group of each name"
        )
        sizes = sorted({size for size, _, _ in self.left_out})
        tail = [f"not measured for lack of time (--seconds): sizes of {', '.join(map(bytes_text, sizes))}"]
        return "\n".join(line.rstrip() for line in [head, *text, *(tail if sizes else [])])

    def _cells(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        link = row["link_bandwidth"]
        return (
            row["group"],
            str(len(row["slowest_ranks"])),
            row["operation"],
            bytes_text(row["size_bytes"]),
            f"{row['seconds'] * 1e6:.1f} us",
            _bandwidth_text(row["algorithm_bandwidth"]),
            _bandwidth_text(row["bus_bandwidth"]),
            "-" if link is None else f"{link:.1f}",
            "-" if link is None else f"{row['bus_bandwidth'] / link:.0%}",
        )

    def content(self) -> dict[str, Any]:
        """The content of the JSON file."""
        import torch

        return {
            "megaswift": __version__,
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": self.backend,
            "device": self.placement.device,
            "layout": self.layout.describe(),
            "nodes": list(self.placement.nodes),
            "unit": "GB/s (1e9 bytes per second)",
            "groups": {name: [list(ranks) for ranks in groups] for name, groups in self.groups.items()},
            "measurements": self.rows(),
            "left_out": [{"size_bytes": s, "group": g, "operation": o} for s, g, o in self.left_out],
        }

    def write(self, file: Path) -> None:
        """The JSON file, and the picture beside it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(self.content(), indent=1) + "\n")
        self._draw(file.with_suffix(".png"))

    def _draw(self, picture: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        rows = self.rows()
        names = [name for name in self.groups if any(row["group"] == name for row in rows)] or list(self.groups)
        figure = Figure(figsize=(8, 1 + 2.6 * len(names)), dpi=130, layout="constrained")
        axes = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
        for axis, name in zip(axes, names, strict=True):
            _draw_group(axis, [row for row in rows if row["group"] == name])
            size = len(self.groups[name][0])
            axis.set_title(f"{name}: {len(self.groups[name])} x {size} ranks", loc="left", fontsize=10, color=INK)
        axes[-1].set_xlabel("size (bytes)", color=INK, fontsize=9)
        figure.suptitle(f"{self.layout.describe()}, {self.backend}, {self.placement.device}", fontsize=11, color=INK)
        with atomic_file(picture) as fresh:
            figure.savefig(fresh, format="png")


def _bandwidth_text(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _draw_group(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bus bandwidth over size, one line for each operation; dashed: what the links carry."""
    for operation, color in COLORS.items():
        of = [row for row in rows if row["operation"] == operation]
        if not of:
            continue
        sizes = [row["size_bytes"] for row in of]
        axis.plot(sizes, [row["bus_bandwidth"] for row in of], color=color, marker="o", markersize=3, label=operation)
        links = [row["link_bandwidth"] for row in of]
        if None not in links:
            axis.plot(sizes, links, color=color, linestyle="--", linewidth=0.9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylabel("bus bandwidth (GB/s)", color=INK, fontsize=8)
    axis.grid(color=GRID, linewidth=0.7)
    axis.tick_params(colors=INK, labelsize=8, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    if rows:
        axis.legend(frameon=False, fontsize=7, labelcolor=INK)
