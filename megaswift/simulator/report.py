"""Shows a simulation: one screen, a JSON file, a picture of pipeline and memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import atomic_file, write_atomically
from megaswift.base.byte_size import bytes_text
from megaswift.log import count_text
from megaswift.parallel.layout import GRIDS, Layout
from megaswift.planner.machine import LINK, NETWORK
from megaswift.run.report.loss_png import GRID, INK
from megaswift.simulator.agreement import Disagreement, compared_calls, disagreements
from megaswift.simulator.calls import Call, Form, Group, Pass, Trace
from megaswift.simulator.rank import SimulatedRun, representatives
from megaswift.simulator.timeline import Timeline, timeline
from megaswift.simulator.traffic import bytes_by_link
from megaswift.version import __version__

WIDTH = 100
MOST_STAGES = 16
MOST_ROWS = 24
NOT_SIMULATED = (
    "values: what the host reads of tensors is 1, so that gradients are finite and each step is taken",
    "agreement of ranks at the start (options, files, programs): other ranks are taken to have what this one has",
    "reading of data and weights, evaluation, checkpoints, export",
    "kernels: layers are torch's, which call the same collectives as Transformer Engine's; context parallelism gathers "
    "keys and values (cp_comm_type all_gather)",
    "memory outside of tensors: CUDA's context, NCCL's buffers, kernels' workspaces, fragmentation",
)
OF_EXPERTS = "the choice of experts: each gets as many tokens"
OF_KERNELS = "options of Transformer Engine's kernels, without which memory is higher"
Durations = Callable[[int, Pass], float]
"""(stage, pass) -> its time."""


@dataclass(frozen=True)
class Simulation:
    """Traces of ranks, and what they are taken from."""

    run: SimulatedRun
    traces: Mapping[int, Trace]
    gpus_per_node: int
    title: str
    durations: Durations
    unit: str
    """Of the durations: `s`, or what a duration of 1 is."""
    forecast: str = ""
    """The memory of the fullest rank by the planner's formulas, in words."""

    @property
    def layout(self) -> Layout:
        """The layout of the run."""
        return self.run.layout

    @cached_property
    def found(self) -> list[Disagreement]:
        """Ranks that do not fit together."""
        return disagreements(self.traces)

    @cached_property
    def pipeline(self) -> Timeline | None:
        """The passes of the last step; None where ranks of a stage are missing."""
        stages: dict[int, list[Pass]] = {}
        for rank, trace in self.traces.items():
            passes = last_step(trace, self.run.steps)
            stages.setdefault(self.layout.coordinates(rank).pp, passes)
        if len(stages) < self.layout.pp:
            return None
        return timeline(dict(sorted(stages.items())), self.durations)

    def not_simulated(self) -> list[str]:
        """Return what the figures leave out."""
        left_out = [f"{OF_KERNELS}: {', '.join(self.run.left_out)}"] if self.run.left_out else []
        return [*([OF_EXPERTS] if self.run.spec.experts else []), *left_out, *NOT_SIMULATED]

    def calls(self, rank: int) -> list[Call]:
        """Return the calls of a rank's last step."""
        return [c for c in self.traces[rank].calls if c.step == self.run.steps]

    def text(self) -> str:
        """Write the screen."""
        blocks = [self._head(), self._agreement(), self._collectives(), self._links(), self._memory(), self._picture()]
        blocks.append("not simulated:\n" + "\n".join(f"  - {line}" for line in self.not_simulated()))
        return "\n\n".join(filter(None, blocks))

    def _head(self) -> str:
        batch = self.run.microbatches()[0]
        rows, length = batch.input_ids.shape
        count = len(representatives(self.layout))
        lines = [
            f"{self.title} on {self.layout.world_size} ranks, {self.gpus_per_node} a node: {self.layout.describe()}",
            f"a step: {self.run.passes} micro-batches a rank, {rows} x {length} tokens each",
            f"{len(self.traces)} ranks simulated ({_numbers(self.traces)}); ranks that differ in their data alone are "
            f"one class, of which there are {count}",
        ]
        return "\n".join(lines)

    def _agreement(self) -> str:
        if self.found:
            return f"{count_text(len(self.found), 'place')} where ranks do not fit together:\n" + "\n".join(
                map(str, self.found)
            )
        both, alone = compared_calls(self.traces)
        complete = self.traces.keys() >= set(representatives(self.layout))
        why = "are among ranks of one class" if complete else "have no other simulated rank in their group"
        rest = f"; {alone} {why}" if alone else ""
        return f"agreement: {both} calls fit those of the other ranks in order, operation, shape and line{rest}"

    def _collectives(self) -> str:
        rank = min(self.traces)
        kinds: dict[tuple[str, str], list[Call]] = {}
        for call in self.calls(rank):
            kinds.setdefault((group_axes(call.group, self.layout), call.name), []).append(call)
        rows = [("group", "ranks", "operation", "calls", "sent", "first called from")]
        for (axes, name), calls in sorted(kinds.items(), key=lambda kind: -_wire(kind[1], rank, self.gpus_per_node)):
            size = bytes_text(_wire(calls, rank, self.gpus_per_node))
            rows.append((axes, str(len(calls[0].group.ranks)), name, str(len(calls)), size, calls[0].where))
        more = f"\n  and {len(rows) - MOST_ROWS} more kinds" if len(rows) > MOST_ROWS else ""
        return f"a step of rank {rank}, by bytes on the wire:\n{_table(rows[:MOST_ROWS])}{more}"

    def links(self, rank: int) -> Counter[str]:
        """Return the bytes that a rank sends in the last step, by link."""
        found: Counter[str] = Counter()
        for call in self.calls(rank):
            found += bytes_by_link(call, rank, self.gpus_per_node)
        return found

    def _links(self) -> str:
        rows = [("rank", "stage", LINK, NETWORK)]
        for rank in self._shown():
            links = self.links(rank)
            stage = str(self.layout.coordinates(rank).pp)
            rows.append((str(rank), stage, bytes_text(links[LINK]), bytes_text(links[NETWORK])))
        return f"sent in a step, by link (rings in the order of ranks):\n{_table(rows)}"

    def _shown(self) -> list[int]:
        """The first rank of each stage."""
        first: dict[int, int] = {}
        for rank in sorted(self.traces):
            first.setdefault(self.layout.coordinates(rank).pp, rank)
        return [first[stage] for stage in sorted(first)][:MOST_STAGES]

    def _memory(self) -> str:
        rows = [("rank", "stage", "after start-up", "peak", "in")]
        for rank in self._shown():
            start = self.traces[rank].memory[0][1]
            moment, _, peak = max(self.traces[rank].memory, key=lambda entry: entry[2])
            stage = str(self.layout.coordinates(rank).pp)
            rows.append((str(rank), stage, bytes_text(start), bytes_text(peak), moment))
        forecast = (
            f"\n  by the formulas of megaswift plan, with the run's own layers: {self.forecast}"
            if self.forecast
            else ""
        )
        return f"live tensors, with torch's layers:\n{_table(rows)}{forecast}"

    def _picture(self) -> str:
        shown = self.pipeline
        if shown is None:
            return "no picture of the pipeline: a rank of each stage is needed"
        total = f"{shown.end:.2f} s" if self.unit == "s" else f"{shown.end:g} x {self.unit}"
        head = f"pipeline: {total}, of which {shown.bubble:.1%} bubble; 0-9 forward, a-j backward, by micro-batch"
        return head + ("\n" + shown.text(WIDTH) if self.layout.pp <= MOST_STAGES else "")

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON file. Calls are rows of numbers into lists of kinds."""
        shown = self.pipeline
        return {
            "megaswift": __version__,
            "title": self.title,
            "layout": self.layout.describe(),
            "world": self.layout.world_size,
            "gpus_per_node": self.gpus_per_node,
            "steps": self.run.steps,
            "microbatches": self.run.passes,
            "not_simulated": self.not_simulated(),
            "disagreements": [str(one) for one in self.found],
            "bubble": None if shown is None else shown.bubble,
            "pipeline_unit": self.unit,
            "pipeline": [] if shown is None else [list(slot) for slot in shown.slots],
            "ranks": {str(rank): self._content_of(trace) for rank, trace in self.traces.items()},
        }

    def _content_of(self, trace: Trace) -> dict[str, Any]:
        kinds: dict[tuple[Any, ...], int] = {}
        sequence = [
            kinds.setdefault(
                (c.group, c.name, c.sent, c.received, c.peer, c.detail, c.where, c.phase, c.step), len(kinds)
            )
            for c in trace.calls
        ]
        fields = ("group", "ranks", "operation", "sent", "received", "peer", "detail", "from", "phase", "step")
        return {
            "coordinates": vars(self.layout.coordinates(trace.rank)),
            "link_bytes": dict(self.links(trace.rank)),
            "kinds": [
                dict(
                    zip(
                        fields,
                        (
                            group_axes(k[0], self.layout),
                            k[0].ranks,
                            k[1],
                            _forms(k[2]),
                            _forms(k[3]),
                            *k[4:],
                        ),
                        strict=True,
                    )
                )
                for k in kinds
            ],
            "calls": sequence,
            "memory": [list(entry) for entry in trace.memory],
        }

    def write(self, file: Path) -> None:
        """Write the JSON file, and the picture beside it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(self.content()) + "\n")
        self._draw(file.with_suffix(".png"))

    def _draw(self, picture: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        stages = self.layout.pp
        figure = Figure(figsize=(14, 3.2 + 0.34 * stages), dpi=120, layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=(0.34 * stages + 0.8, 2.4))
        shown = self.pipeline
        if shown is not None:
            draw_pipeline(top, shown, self.unit)
        for rank in self._shown():
            stage = self.layout.coordinates(rank).pp
            peaks = [most / 2**30 for _, _, most in self.traces[rank].memory]
            if shown is None:
                bottom.plot(peaks, linewidth=1, label=f"stage {stage}")
            else:
                ends = sorted(slot.end for slot in shown.slots if slot.stage == stage)
                bottom.plot(ends, peaks[-len(ends) - 1 : -1], linewidth=1, label=f"stage {stage}")
                bottom.set_xlim(0, shown.end)
        bottom.set_ylabel("GiB of live tensors, most in a pass", color=INK, fontsize=9)
        bottom.set_xlabel("passes" if shown is None else "the same time", color=INK, fontsize=9)
        bottom.tick_params(colors=INK, labelsize=8, length=0)
        bottom.grid(color=GRID, linewidth=0.7)
        bottom.legend(fontsize=7, ncols=8, frameon=False)
        figure.suptitle(self._head().splitlines()[0], fontsize=10, color=INK)
        with atomic_file(picture) as fresh:
            figure.savefig(fresh, format="png")


FORWARD = ("#1f5fb4", "#5d9cdf", "#8fbce8", "#b9d6f2", "#33739f", "#6fa5c8", "#a6c9de", "#cfe1ec")
BACKWARD = ("#d9730d", "#e3a857", "#edc58e", "#f5dfc0", "#b5541c", "#d08a5c", "#e4b694", "#f2dccb")
"""Colors of a stage's chunks."""


def draw_pipeline(axis: Any, shown: Timeline, unit: str) -> None:
    """Draw a row of bars for each stage."""
    for kind, colors in (("forward", FORWARD), ("backward", BACKWARD)):
        for stage in range(shown.stages):
            slots = [s for s in shown.slots if s.stage == stage and s.kind == kind]
            spans = [(s.start, s.end - s.start) for s in slots]
            chunks = [colors[s.chunk % len(colors)] for s in slots]
            axis.broken_barh(spans, (stage - 0.4, 0.8), facecolors=chunks, edgecolor="white", linewidth=0.3)
    axis.set_yticks(range(shown.stages), [f"stage {stage}" for stage in range(shown.stages)])
    axis.invert_yaxis()
    axis.set_xlim(0, shown.end)
    label = "seconds, by roofline" if unit == "s" else f"time of {unit}"
    axis.set_xlabel(f"{label}; blue forward, orange backward, {shown.bubble:.1%} bubble", color=INK, fontsize=9)
    axis.tick_params(colors=INK, labelsize=8, length=0)


def last_step(trace: Trace, steps: int) -> list[Pass]:
    """Return the passes of the last step, micro-batches counted from 0."""
    passes = [p for p in trace.passes if p.step == steps]
    first = min((p.microbatch for p in passes), default=0)
    return [p._replace(microbatch=p.microbatch - first) for p in passes]


@cache
def group_axes(group: Group, layout: Layout) -> str:
    """Return the axes along which the ranks of a group differ (`tp`, `cp-dp`; of both grids where the ranks are the
    same, `tp-dp = ep`), `all`, or the ranks themselves."""
    if len(group.ranks) == layout.world_size:
        return "all"
    found = []
    for grid in GRIDS.values():
        places = [_place(layout, member, grid) for member in group.ranks]
        varied = [axis for n, axis in enumerate(grid) if len({place[n] for place in places}) > 1]
        if prod(getattr(layout, axis) for axis in varied) == len(group.ranks):
            found.append("-".join(varied))
    experts = layout.ep * layout.etp > 1
    return " = ".join(dict.fromkeys(found if experts else found[:1])) or _numbers(group.ranks)


def _place(layout: Layout, rank: int, grid: Sequence[str]) -> tuple[int, ...]:
    place = layout.coordinates(rank)
    return tuple(getattr(place, axis) for axis in grid)


def _forms(forms: Form) -> list[str]:
    return [f"{dtype}{list(shape)}" for shape, dtype in forms]


def _wire(calls: Sequence[Call], rank: int, gpus_per_node: int) -> int:
    return sum(sum(bytes_by_link(call, rank, gpus_per_node).values()) for call in calls)


def _numbers(ranks: Mapping[int, Any] | Sequence[int]) -> str:
    numbers = list(ranks)
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, {numbers[2]}, ... {numbers[-1]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
