"""Layout checks before any process group exists: all problems at once, and the nearest layout that works.

Owns how mistakes are collected and the search; the rules themselves are in `constraints.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import log2
from typing import Any

from megaswift.errors import LayoutError, Problem
from megaswift.log import count_text
from megaswift.options.values import option_value_text
from megaswift.parallel.constraints import LayoutRequest, broken_rule_problems
from megaswift.parallel.layout import FLAGS, Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit, divisors

ALONE = ("tp", "cp", "ep", "etp")
"""Axes whose size is ruled out, whatever the others are, when it does not work with all others at 1."""


def legal_layout(shape: ModelShape, request: LayoutRequest) -> Layout:
    """The layout that a run asks for; LayoutError with everything that is wrong with it."""
    problems = layout_problems(shape, request)
    if problems:
        raise LayoutError(problems)
    return request.layout


def layout_problems(shape: ModelShape, request: LayoutRequest) -> list[Problem]:
    """All that is wrong; the last entry also names the nearest layout that works."""
    problems = list(dict.fromkeys(broken_rule_problems(shape, request)))
    if problems:
        near = nearest_layout(shape, request)
        if near is not None:
            last = problems[-1]
            processes = count_text(request.world_size, "process")
            text = f"nearest layout that works on {processes}: {suggested_layout_flags_text(near, request)}"
            problems[-1] = replace(last, fix="\n         ".join(filter(None, (last.fix, text))))
    return problems


def nearest_layout(shape: ModelShape, request: LayoutRequest) -> LayoutRequest | None:
    """The legal layout on as many processes with the fewest changed settings, then the smallest change of sizes (as
    ratios).

    The model, the sequence length and the batch sizes stay as they are. None when no layout goes with these."""
    options = _options(shape, request)
    hopeless = {axis for axis in ALONE if axis in options and not _alone(shape, request, axis, request.axes[axis])}
    for changes in range(len(hopeless), len(options) + 1):
        choices = [names for names in combinations(options, changes) if hopeless <= set(names)]
        candidates = [a for names in choices for a in _variants(request, options, names) if _works(shape, a)]
        if candidates:
            return min(candidates, key=lambda a: (_distance(a, request), -a.tp * a.pp * a.cp))
    return None


def suggested_layout_flags_text(near: LayoutRequest, request: LayoutRequest) -> str:
    """The flags of a layout: those that are not 1, and those that differ from the request."""
    parts = [f"{FLAGS[axis]} {size}" for axis, size in near.axes.items() if size > 1 or size != request.axes[axis]]
    if near.split != PipelineSplit():
        ends = {
            "--first_stage_layers": near.split.first,
            "--last_stage_layers": near.split.last,
            "--pipeline_layout": near.split.custom,
        }
        parts += [f"{flag} {value}" for flag, value in ends.items() if value is not None]
    if near.sequence_parallel is not None:
        parts.append(f"--sequence_parallel {str(near.sequence_parallel).lower()}")
    if near.cp > 1 and near.cp_comm_type != "p2p":
        parts.append(f"--cp_comm_type {near.cp_comm_type}")
        if near.cp_comm_type == "a2a+p2p":
            parts.append(f"--hierarchical_context_parallel_sizes {option_value_text(near.context_levels)}")
    return " ".join(parts or ["none of these flags"]) + f" (data parallel: {near.known_dp})"


def _alone(shape: ModelShape, request: LayoutRequest, axis: str, size: int) -> bool:
    change: dict[str, Any] = {axis: size}
    return _works(shape, replace(LayoutRequest(request.world_size, max_length=request.max_length), **change))


def _options(shape: ModelShape, request: LayoutRequest) -> dict[str, list[Any]]:
    """For each setting the values to try instead of the one asked for."""
    world = divisors(request.world_size)
    options: dict[str, list[Any]] = {axis: [n for n in world if _alone(shape, request, axis, n)] for axis in ALONE}
    options["pp"] = [
        n for n in world if n <= shape.num_layers and (request.split != PipelineSplit() or shape.num_layers % n == 0)
    ]
    options["vpp"] = divisors(shape.num_layers)
    options["split"] = [PipelineSplit()]
    options["sequence_parallel"] = [None]
    options["cp_comm_type"] = ["p2p"]
    alternatives = {name: [v for v in values if v != getattr(request, name)] for name, values in options.items()}
    return {name: values for name, values in alternatives.items() if values}


def _variants(request: LayoutRequest, options: dict[str, list[Any]], names: tuple[str, ...]) -> Iterator[LayoutRequest]:
    for values in product(*(options[name] for name in names)):
        changed = dict(zip(names, values, strict=True))
        sizes = {**request.axes, **changed}
        if request.world_size % max(1, sizes["tp"] * sizes["pp"] * sizes["cp"]) == 0 and (
            sizes["pp"] > 1 or sizes["vpp"] == 1
        ):
            yield replace(request, dp=None, **changed)


def _works(shape: ModelShape, request: LayoutRequest) -> bool:
    return next(broken_rule_problems(shape, request), None) is None


def _distance(near: LayoutRequest, request: LayoutRequest) -> float:
    sizes = sum(abs(log2(near.axes[axis] / max(1, size))) for axis, size in request.axes.items())
    return sizes + (request.dp is not None and near.known_dp != request.dp) / 2
