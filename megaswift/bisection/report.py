"""What bisect says: one screen, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megaswift.bisection.compare import Comparison, Verdict, facts
from megaswift.bisection.trace_folder import (
    BACKWARD,
    CLIPPED,
    DIVISION,
    GATHERED,
    GRADIENT,
    INPUT,
    KINDS,
    LOSS,
    OF_PARAMETERS,
    OUTPUT,
    RECOMPUTED,
    WEIGHT,
)
from megaswift.log import count_text
from megaswift.parallel.layout import Layout

NAMED = {
    DIVISION: "division into stages",
    INPUT: "input",
    OUTPUT: "output",
    LOSS: "loss",
    RECOMPUTED: "recomputed output",
    BACKWARD: "gradient of the output",
    GRADIENT: "reduced gradient",
    CLIPPED: "clipped gradient",
    WEIGHT: "main weight after the step",
    GATHERED: "the model's weight after the step",
}
AXES = ("tp", "cp", "dp", "pp", "ep")
SHOWN = 6


def suspect(found: Comparison) -> str:
    """The module whose computation is wrong: where an output or a parameter differs its own, where the gradient of an
    output differs the module that read it, whose backward pass computes that gradient."""
    first = found.first
    if first is None:
        return ""
    if first.kind == BACKWARD:
        before = [v for v in found.verdicts if v.kind == BACKWARD and v.order[:3] == first.order[:3]]
        earlier = [v.name for v in before if v.order < first.order]
        return earlier[-1] if earlier else "head"
    if first.kind in OF_PARAMETERS:
        return first.name.rpartition(".")[0]
    return first.name


def axes_text(found: Comparison, layout: Layout) -> str:
    """The axes along which the ranks' verdicts on the first tensor agree, and along which they differ."""
    first = found.first
    if first is None:
        return ""
    states = {v.rank: v.bad for v in found.like(first) if v.kind == first.kind and v.name == first.name}
    agree: list[str] = []
    differ: list[str] = []
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        by_others: dict[tuple[int, ...], set[bool]] = {}
        counted = set()
        for rank, bad in states.items():
            place = layout.coordinates(rank)
            others = tuple(getattr(place, one) for one in ("tp", "cp", "dp", "pp") if one != axis)
            by_others.setdefault(others, set()).add(bad)
            counted.add(getattr(place, axis))
        if len(counted) > 1:
            (differ if any(len(s) > 1 for s in by_others.values()) else agree).append(axis)
    parts = [f"agree along {', '.join(agree)}"] if agree else []
    parts += [f"differ along {', '.join(differ)}"] if differ else []
    return "ranks " + " and ".join(parts) if parts else ""


def layer_ranges(found: Comparison) -> tuple[str, str]:
    """(Layers whose tensors agree everywhere, layers whose outputs agree), as ranges."""
    by_layer: dict[int, list[Verdict]] = {}
    for verdict in found.verdicts:
        if verdict.name.startswith("layers."):
            by_layer.setdefault(int(verdict.name.split(".")[1]), []).append(verdict)
    whole = [n for n, all_of in by_layer.items() if not any(v.bad for v in all_of)]
    shown = (DIVISION, OUTPUT)
    forward = [n for n, all_of in by_layer.items() if not any(v.bad for v in all_of if v.kind in shown)]
    return _ranges(whole), _ranges(forward)


def agreement_text(found: Comparison, layout: Layout) -> str:
    """Along which axes ranks agree on the first tensor, and which layers agree."""
    whole, forward = layer_ranges(found)
    agreeing = f"layers {whole} agree everywhere" if whole else "no layer agrees everywhere"
    if forward and forward != whole:
        agreeing += f"; outputs of layers {forward} agree"
    return "; ".join(part for part in (axes_text(found, layout), agreeing) if part)


def _ranges(numbers: Sequence[int]) -> str:
    parts = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(parts)


def verdict_text(verdict: Verdict, layout: Layout) -> str:
    """One line about a tensor, with the rank's place on the axes of more than one rank."""
    if verdict.kind == DIVISION:
        if math.isinf(verdict.difference):
            return f"{verdict.name} is on no pipeline stage"
        stages = f"{verdict.difference + 1:.0f} pipeline stages"
        return f"{verdict.name} is on {stages}, the last of them pp {verdict.place.pp}"
    axes = [axis for axis in ("tp", "cp", "dp", "pp") if getattr(layout, axis) > 1]
    places = ", ".join(f"{axis} {getattr(verdict.place, axis)}" for axis in axes)
    rank = f"rank {verdict.rank} ({places})" if places else f"rank {verdict.rank}"
    when = "" if verdict.microbatch is None else f", micro-batch {verdict.microbatch}"
    size = f"{verdict.difference:.1e}, expected <= {verdict.expected:.1e}"
    return f"{verdict.name}, {NAMED[verdict.kind]}{when}, {rank}: {size}"


def screen(found: Comparison, layout: Layout, against: str) -> str:
    """The answer, on one screen."""
    count = f"{len(found.verdicts)} tensors of {count_text(layout.world_size, 'rank')} against {against}"
    lines = [f"compared {count}, {layout.describe()}"]
    first = found.first
    if first is None:
        return "\n".join([*lines, "no difference beyond rounding", *_notes(found)])
    lines.append(f"first difference: {verdict_text(first, layout)}")
    lines.append(agreement_text(found, layout))
    if first.kind == BACKWARD:
        lines.append(f"computed in the backward pass of {suspect(found)}")
    lines.append("")
    lines.append(f"{'':<28}{'tensors':>9}{'differ':>9}   first of them")
    for kind in (DIVISION, *KINDS):
        of_kind = [v for v in found.verdicts if v.kind == kind]
        bad = [v for v in of_kind if v.bad]
        if of_kind:
            lines.append(f"{NAMED[kind]:<28}{len(of_kind):>9}{len(bad):>9}   {bad[0].name if bad else ''}")
    return "\n".join([*lines, *_notes(found)])


def _notes(found: Comparison) -> list[str]:
    notes = [f"replicas have the same rows: {text}" for text in found.repeated[:1]]
    if found.skipped:
        more = f" and {len(found.skipped) - SHOWN} more" if len(found.skipped) > SHOWN else ""
        notes.append(f"without a counterpart: {', '.join(found.skipped[:SHOWN])}{more}")
    return notes


def report_json(found: Comparison, layout: Layout, against: str) -> dict[str, Any]:
    """Everything, as plain values."""
    first = found.first
    whole, forward = layer_ranges(found)
    return {
        "against": against,
        "layout": layout.describe(),
        "agrees": first is None,
        "first": None if first is None else facts(first),
        "suspect": suspect(found),
        "axes": axes_text(found, layout),
        "layers_that_agree": whole,
        "layers_whose_outputs_agree": forward,
        "without_counterpart": found.skipped,
        "replicas_with_the_same_rows": found.repeated,
        "tensors": [{**facts(v), "differs": v.bad} for v in found.verdicts],
    }
